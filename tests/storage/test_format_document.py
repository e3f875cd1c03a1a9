"""`docs/format.md` shows what the code writes."""

from tests.storage.examples import DOCUMENT, examples, named, renewed, stable


def test_every_example_in_the_document_is_what_the_code_writes() -> None:
    document = DOCUMENT.read_text()
    assert stable(renewed(document)) == stable(document)


def test_the_document_shows_every_file_and_role() -> None:
    assert named(DOCUMENT.read_text()) == set(examples())
