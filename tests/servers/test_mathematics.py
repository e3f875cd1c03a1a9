"""math: answers compared as mathematics, in a process that can be ended."""

import asyncio
from typing import Any

import pytest

from commands.embedded import chosen
from gymckpt.collection.settings import CollectSettings
from gymckpt.errors import UsageError
from gymckpt.servers.deployment import EXTRAS, bundled_deployment
from gymckpt.servers.resources.mathematics import Comparer, Mathematics, MathOptions
from gymckpt.servers.resources.server import Verification
from gymckpt.tasksets import task_rows
from tests.servers.worked import Worked

pytest.importorskip("math_verify", reason="the extra math is not installed")


async def verdicts(bodies: list[dict[str, Any]], **options: Any) -> list[dict[str, Any]]:
    server = Mathematics("math", MathOptions(**options))
    try:
        return list(await asyncio.gather(*(server.verify(Verification(None, body)) for body in bodies)))
    finally:
        await server.shutdown()


def said(text: str, expected: str) -> dict[str, Any]:
    message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
    return {"expected_answer": expected, "response": {"output": [message]}}


def test_the_form_of_an_answer_does_not_matter_and_its_value_does() -> None:
    cases = [
        ("so it is \\boxed{\\frac{2}{4}}", "1/2", 1.0),
        ("\\boxed{x^2 + 2x + 1}", "$(x+1)^2$", 1.0),
        ("The answer is 12.", "12", 1.0),
        ("\\boxed{3}", "4", 0.0),
        ("I do not know.", "4", 0.0),
        ("", "4", 0.0),
    ]
    found = asyncio.run(verdicts([said(text, expected) for text, expected, _ in cases]))
    assert [verdict["reward"] for verdict in found] == [reward for _, _, reward in cases]


def test_the_scripted_policy_answers_most_questions_and_errs_sometimes() -> None:
    async def main() -> list[float]:
        bodies = []
        for row in task_rows("math"):
            worked = Worked(row, row["task_id"]["task_id"])
            await worked.go(lambda name, arguments: pytest.fail("no tools"))
            bodies.append(worked.verify_body)
        return [verdict["reward"] for verdict in await verdicts(bodies)]

    rewards = asyncio.run(main())
    assert 0.6 <= sum(rewards) / len(rewards) <= 0.95


def test_a_comparison_that_takes_too_long_is_no_match_and_the_next_one_has_a_process_again() -> None:
    async def main() -> None:
        comparer = Comparer()
        try:
            assert await comparer.compare("1", "\\boxed{1}", timeout_s=0.001) == (False, None)
            assert await comparer.compare("1", "\\boxed{1}", timeout_s=60.0) == (True, "1")
        finally:
            await comparer.stop()

    asyncio.run(main())


def test_without_the_extra_the_bundled_servers_do_without_math_and_its_task_set_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(EXTRAS, "math", "a_package_that_nobody_has")
    assert "math" not in {server.instance for server in bundled_deployment().servers}
    assert "answer_match" in {server.instance for server in bundled_deployment().servers}
    with pytest.raises(UsageError, match="@math needs a package") as caught:
        chosen(CollectSettings(tasks="@math"))
    assert caught.value.hint == "pip install 'gymckpt[math]'"
