"""The public surface of `gymckpt.coordination`, which other controllers build on."""

import inspect

from gymckpt import coordination

SURFACE = [
    "NO_PATH_MAP",
    "Answers",
    "Committed",
    "Cut",
    "Deployment",
    "Failure",
    "ParticipantName",
    "ParticipantRef",
    "PathMap",
    "PathMapping",
    "Prepared",
    "cannot_capture",
    "check_cut",
    "commit",
    "describe",
    "discover",
    "ended_at_cut",
    "failed",
    "forget",
    "missing_in",
    "prepare",
    "probe",
    "renew",
    "restore",
    "resume",
    "retire",
    "statuses",
]


def test_names_may_be_added_but_not_taken_away() -> None:
    assert sorted(coordination.__all__) == sorted(SURFACE)


def test_everything_public_says_what_it_promises() -> None:
    for name in coordination.__all__:
        thing = getattr(coordination, name)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            assert inspect.getdoc(thing), name


def test_every_operation_takes_the_deployment_the_transport_and_the_token_first() -> None:
    for name in ("prepare", "commit", "renew", "resume", "restore", "retire", "forget", "statuses", "probe"):
        parameters = list(inspect.signature(getattr(coordination, name)).parameters)
        assert parameters[:3] == ["deployment", "transport", "token"], name
        assert "deadline" in parameters, name
