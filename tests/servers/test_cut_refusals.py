"""Whatever is wrong with a receipt, a staged prefix or a claim costs the cut, and nothing else."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import Response

from gymckpt import jsoncodec
from gymckpt.wire.cuts import CUT_PATH, STAGED_PATH, PrefixClaim, prefix_digest
from tests.servers.cutting import answer_after_restore, cut_in_the_middle, run, scene


def change(path: str, edit: Callable[[dict[str, Any]], Any]) -> Callable[[FastAPI], None]:
    """Change what the worker answers on `path`."""

    def wrap(app: FastAPI) -> None:
        @app.middleware("http")
        async def changed(request: Request, call_next: Callable[[Request], Awaitable[Any]]) -> Response:
            response = await call_next(request)
            if request.url.path != path or response.status_code != 200:
                return response if isinstance(response, Response) else Response(status_code=500)
            body = jsoncodec.loads(b"".join([chunk async for chunk in response.body_iterator]))
            value = edit(body)
            return Response(jsoncodec.dumps(body if value is None else value), media_type="application/json")

    return wrap


def _prefix(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    def edit(receipt: dict[str, Any]) -> None:
        receipt["prefixes"][0].update(fields)

    return edit


def _without(name: str) -> Callable[[dict[str, Any]], Any]:
    def edit(receipt: dict[str, Any]) -> None:
        del receipt["prefixes"][0][name]

    return edit


def _claim(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    def edit(reply: dict[str, Any]) -> None:
        reply["prefixes"][0].update(fields)

    return edit


def _twice(receipt: dict[str, Any]) -> None:
    receipt["prefixes"] = receipt["prefixes"] * 2


def _source(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    def edit(reply: dict[str, Any]) -> None:
        reply["prefixes"][0]["source"].update(fields)

    return edit


def _one_more(receipt: dict[str, Any]) -> None:
    receipt["prefixes"].append({**receipt["prefixes"][0], "ticket_id": "other", "staging_keys": ["other"]})


def _swapped_log_prob(reply: dict[str, Any]) -> None:
    reply["prefixes"][0]["log_probs"][0] -= 0.5


def _swapped_token(reply: dict[str, Any]) -> None:
    reply["prefixes"][0]["token_ids"][0] += 1


WRONG_RECEIPTS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "another checkpoint": (
        lambda receipt: receipt.update(checkpoint_id="ckpt-000777-00000000"),
        "it is for checkpoint 'ckpt-000777-00000000'",
    ),
    "another inventory digest": (
        lambda receipt: receipt.update(inventory_digest="0" * 64),
        "its inventory_digest is another",
    ),
    "another inventory": (lambda receipt: receipt.update(inventory=[]), "its inventory is another"),
    "no prefix for the ticket": (lambda receipt: receipt.update(prefixes=[]), "is not covered"),
    "a ticket twice": (_twice, "a ticket is covered twice"),
    "a ticket not asked for": (_prefix(ticket_id="other"), "is not covered"),
    "a ticket more than asked for": (_one_more, "ticket 'other' was not asked for"),
    "another rollout": (_prefix(rollout_id="r-2"), "has another identity"),
    "another attempt": (_prefix(attempt=1), "has another identity"),
    "another call": (_prefix(model_call_id="other"), "has another identity"),
    "another admission": (_prefix(admitted_at=1.0), "has another identity"),
    "an unknown disposition": (_prefix(disposition="maybe"), "disposition"),
    "no staging key": (_prefix(staging_keys=[]), "staging_keys must be unique, and at least one"),
    "staging keys missing": (_without("staging_keys"), "a durable_prefix names"),
    "a staging key twice": (_prefix(staging_keys=["a", "a"]), "staging_keys must be unique"),
    "no kind": (_without("cut_kind"), "a durable_prefix names"),
    "an unknown kind": (_prefix(cut_kind="half"), "cut_kind"),
    "no buffer": (_without("frozen_buffer_id"), "a durable_prefix names"),
    "no count": (_without("prefix_token_count"), "a durable_prefix names"),
    "a negative count": (_prefix(prefix_token_count=-1), "prefix_token_count"),
    "a count beyond the limit": (_prefix(effective_output_limit=19), "beyond effective_output_limit"),
    "no digest": (_without("prefix_digest"), "a durable_prefix names"),
    "a digest that is none": (_prefix(prefix_digest="x"), "prefix_digest"),
    "no output limit": (_without("effective_output_limit"), "a durable_prefix names"),
    "an output limit of nothing": (_prefix(effective_output_limit=0), "effective_output_limit"),
    "terminal without a finish reason": (_prefix(cut_kind="terminal_completion"), "terminal_finish_reason belongs"),
    "a stop reason without a finish reason": (
        _prefix(terminal_stop_reason="end_of_turn"),
        "terminal_stop_reason requires terminal_finish_reason",
    ),
    "a finish reason on an active prefix": (_prefix(terminal_finish_reason="stop"), "terminal_finish_reason belongs"),
    "an unknown finish reason": (
        _prefix(cut_kind="terminal_completion", terminal_finish_reason="tired"),
        "terminal_finish_reason",
    ),
    "a failure that carries a prefix": (_prefix(disposition="durable_failure"), "a durable_failure carries no prefix"),
    "no cut id": (lambda receipt: receipt.update(cut_id=""), "cut_id"),
    "no backend snapshot": (lambda receipt: receipt.update(backend_snapshot_id=""), "backend_snapshot_id"),
    "other weights": (lambda receipt: receipt.update(backend_snapshot_id="v9"), "its policy_version is another"),
    "not an object": (lambda receipt: [], "what came is no CutReceipt"),
}


WRONG_PREFIXES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "not staged": (lambda reply: reply.update(prefixes=[None]), "it is not staged any more"),
    "too few": (lambda reply: reply.update(prefixes=[]), "0 staged prefixes came for 1 keys"),
    "other staging keys": (_claim(staging_keys=["other"]), "its staging_keys is another"),
    "another rollout": (_source(rollout_id="r-2"), "its source is another"),
    "another attempt": (_source(attempt=1), "its source is another"),
    "another call": (_source(model_call_id="other"), "its source is another"),
    "another request": (_claim(request_digest="0" * 64), "its request_digest is another"),
    "another policy version": (_claim(policy_version="v9"), "its policy_version is another"),
    "another count": (_claim(prefix_token_count=99), "its prefix_token_count is another"),
    "another digest": (_claim(prefix_digest="0" * 64), "its prefix_digest is another"),
    "another limit": (_claim(effective_output_limit=7), "its effective_output_limit is another"),
    "a finish reason": (_claim(finish_reason="stop"), "its finish_reason is another"),
    "a token too few": (lambda reply: reply["prefixes"][0]["token_ids"].pop() and None, "its number of tokens"),
    "a log probability too few": (
        lambda reply: reply["prefixes"][0]["log_probs"].pop() and None,
        "its number of log_probs",
    ),
    "another token": (_swapped_token, "its tokens do not have the digest"),
    "another log probability": (_swapped_log_prob, "its tokens do not have the digest"),
    "tokens that are none": (_claim(token_ids=["x"]), "what came is no StagedReply"),
    "a lineage that is none": (_claim(lineage=[1]), "what came is no StagedReply"),
}


@pytest.mark.parametrize(
    ("path", "edit", "named"),
    [pytest.param(CUT_PATH, *wrong, id=f"receipt: {name}") for name, wrong in WRONG_RECEIPTS.items()]
    + [pytest.param(STAGED_PATH, *wrong, id=f"prefix: {name}") for name, wrong in WRONG_PREFIXES.items()],
)
def test_whatever_is_wrong_with_a_receipt_or_prefix_costs_the_cut_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, path: str, edit: Callable[[dict[str, Any]], Any], named: str
) -> None:
    async def work() -> None:
        async with scene(tmp_path, wrap=change(path, edit), tokens=(50, 60)) as play:
            reply = await cut_in_the_middle(play, "Why?", 20)
            assert (reply["episode_ids"], reply["staging_keys"]) == (["r-1"], [])
            assert (await play.server.status())["report"]["counts"]["cuts_failed"] == 1
        assert named in caplog.text
        async with scene(tmp_path, tokens=(50, 60)) as play:
            got = await answer_after_restore(play, "Why?")
            assert got.status_code == 200
            assert (await play.stats())["generated_tokens"] == len(got.json()["token_ids"])

    run(work())


def _claimed(**fields: Any) -> Callable[[PrefixClaim], PrefixClaim]:
    return lambda claim: claim.model_copy(update=fields)


def _other_tokens(claim: PrefixClaim) -> PrefixClaim:
    token_ids = [token + 1 for token in claim.token_ids]
    return claim.model_copy(update={"token_ids": token_ids, "prefix_digest": prefix_digest(token_ids, claim.log_probs)})


REFUSALS: list[tuple[str, Callable[[PrefixClaim], PrefixClaim]]] = [
    ("staging_keys", lambda claim: claim.model_copy(update={"staging_keys": claim.staging_keys * 2})),
    ("source_call", lambda c: c.model_copy(update={"source": c.source.model_copy(update={"rollout_id": "r-2"})})),
    ("source_call", lambda c: c.model_copy(update={"source": c.source.model_copy(update={"attempt": 1})})),
    ("request_digest", _claimed(request_digest="0" * 64)),
    ("parent_tokens", _claimed(prompt_digest="0" * 64)),
    ("policy_version", _claimed(policy_version="other")),
    ("token_count", _claimed(prefix_token_count=1)),
    ("log_probs", lambda claim: claim.model_copy(update={"log_probs": claim.log_probs[:-1]})),
    ("prefix_digest", _claimed(prefix_digest="0" * 64)),
    ("prefix_digest", lambda claim: claim.model_copy(update={"token_ids": [*claim.token_ids[:-1], 1]})),
    ("lineage", lambda claim: claim.model_copy(update={"lineage": claim.staging_keys})),
    ("lineage", _claimed(lineage=["a", "a"])),
    ("staged_otherwise", _claimed(lineage=["a"])),
    ("staged_otherwise", _other_tokens),
    ("staged_otherwise", _claimed(finish_reason="stop")),
    ("output_budget", lambda claim: claim.model_copy(update={"staging_keys": ["x"], "effective_output_limit": 7})),
    ("staged_otherwise", _claimed(finish_reason="length")),
    ("engine", lambda claim: _other_tokens(claim).model_copy(update={"staging_keys": ["x"]})),
]


def test_a_worker_names_what_is_wrong_with_a_prefix_and_generates_nothing_from_it(tmp_path: Path) -> None:
    async def work() -> None:
        async with scene(tmp_path, tokens=(50, 60)) as play:
            (key,) = (await cut_in_the_middle(play, "Why?", 20))["staging_keys"]
            async with httpx.AsyncClient(transport=httpx.ASGITransport(play.worker), base_url="http://w") as client:
                bearer = {"authorization": "Bearer control-token"}
                staged = await client.post(STAGED_PATH, json={"staging_keys": [key]}, headers=bearer)
                claim = PrefixClaim.model_validate(staged.json()["prefixes"][0])
                before = await play.stats()
                names = {"x-ng-model-call": "again", "x-ng-capture-key": "r-1-a1"}
                for reason, edit in REFUSALS:
                    body = {"input": "Why?", "generation_prefix": edit(claim).model_dump()}
                    got = await client.post("/v1/responses", json=body, headers=names)
                    assert got.status_code == 409, (reason, got.text)
                    assert got.json()["error"]["code"] == "prefix_refused"
                    assert got.json()["error"]["detail"].startswith(f"{reason}: "), got.text
                malformed = {"input": "Why?", "generation_prefix": {"token_ids": "no"}}
                assert (await client.post("/v1/responses", json=malformed, headers=names)).status_code == 400
                assert await play.stats() == before

    run(work())


def test_generation_cuts_need_the_control_token(tmp_path: Path) -> None:
    async def work() -> None:
        async with (
            scene(tmp_path) as play,
            httpx.AsyncClient(transport=httpx.ASGITransport(play.worker), base_url="http://w") as client,
        ):
            for path in (CUT_PATH, STAGED_PATH):
                assert (await client.post(path, json={})).status_code == 401

    run(work())


def test_the_control_token_goes_only_to_backends_that_were_named_for_it(tmp_path: Path) -> None:
    async def work() -> None:
        cases: list[tuple[str, dict[str, Any], int]] = [
            ("unnamed", {"generation_cuts": None}, 0),
            ("named", {"generation_cuts": None, "control_urls": ["http://worker"]}, 1),
            ("off", {"generation_cuts": False, "control_urls": ["http://worker"]}, 0),
        ]
        for name, options, cuts in cases:
            async with scene(tmp_path / name, **options) as play:
                assert len((await cut_in_the_middle(play, "Why?", 20))["staging_keys"]) == cuts
                counts = (await play.server.status())["report"]["counts"]
                assert (counts.get("cuts_taken", 0), counts.get("cuts_failed", 0)) == (cuts, 0)

    run(work())
