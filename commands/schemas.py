"""Which models have a published JSON Schema, by name. `schemas/<name>.json` in the repository holds each."""

import json
from collections.abc import Mapping
from typing import Any, Final

from pydantic import BaseModel, TypeAdapter

from gymckpt.collection.settings import CollectSettings
from gymckpt.report import documents
from gymckpt.servers.deployment import Deployment
from gymckpt.settings import CheckpointSettings
from gymckpt.storage.manifest import Manifest, Sha256
from gymckpt.storage.plainform import PlainManifest
from gymckpt.storage.published import CheckpointFile, CollectionFile
from gymckpt.wire import control, cuts, gym

from .filemodels import index_line, journal_line, run_file

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"

_COLLECT_LINE: Final[Any] = (
    documents.Started
    | documents.CheckpointTaken
    | documents.CheckpointNotTaken
    | documents.Restored
    | documents.OutcomeKnown
    | documents.Note
    | documents.EmbeddedServerChanged
    | documents.Done
)

SCHEMAS: Final[Mapping[str, Any]] = {
    "control-prepare": control.Operation,
    "control-renew": control.Operation,
    "control-resume": control.Operation,
    "control-commit": control.CommitRequest,
    "control-restore": control.RestoreRequest,
    "control-retire": control.RetireRequest,
    "control-forget": control.ForgetRequest,
    "control-probe": control.ProbeRequest,
    "control-status-reply": control.Status,
    "control-prepare-reply": control.PrepareReply,
    "control-renew-reply": control.RenewReply,
    "control-resume-reply": control.ResumeReply,
    "control-commit-reply": control.CommitReply,
    "control-restore-reply": control.RestoreReply,
    "control-retire-reply": control.RetireReply,
    "control-forget-reply": control.ForgetReply,
    "control-probe-reply": control.ProbeReply,
    "control-error": control.ErrorReply,
    "generation-cut": cuts.CutRequest,
    "generation-cut-reply": cuts.CutReceipt,
    "episode-run": gym.RunRequest,
    "episode-run-reply": gym.RunReply,
    "episode-seed": gym.SeedRequest,
    "episode-close-session": gym.CloseSessionRequest,
    "episode-agent-session": gym.AgentSessionRequest,
    "episode-close-agent-session": gym.CloseAgentSessionRequest,
    "episode-close-agent-session-reply": gym.CloseAgentSessionReply,
    "file-run": run_file(),
    "file-checkpoint": CheckpointFile,
    "file-collection": CollectionFile,
    "file-manifest": Manifest,
    "file-manifest-gym": PlainManifest,
    "line-index": index_line(),
    "line-dispatch": journal_line("dispatch"),
    "line-events": journal_line("events"),
    "line-outcomes": journal_line("outcomes"),
    "line-outcomes-index": journal_line("outcomes", index=True),
    "deployment": Deployment,
    "checkpoint-settings": CheckpointSettings,
    "settings": CollectSettings,
    "inspect": documents.InspectDocument,
    "verify": documents.VerifyDocument,
    "report": documents.ReportDocument,
    "status": documents.StatusDocument,
    "collect-line": _COLLECT_LINE,
    "serve-line": documents.Ready | documents.ServerChanged,
}


_SEALED: Final = frozenset({"file-run", "file-checkpoint", "file-collection", "file-manifest"})
"""Files whose last member is the digest of all before it."""


def json_schema(name: str) -> str:
    """The schema `name`, as text with a final newline."""
    described = _described(SCHEMAS[name])
    if name in _SEALED:
        described["properties"]["digest"] = TypeAdapter(Sha256).json_schema()
        described["required"].append("digest")
    schema = {"$schema": DIALECT, "$id": f"gymckpt/{name}", **described}
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def _described(model: Any) -> dict[str, Any]:
    if isinstance(model, dict):
        return model
    adapter: TypeAdapter[Any] = TypeAdapter(model)
    return adapter.json_schema(mode="serialization" if _is_printed(model) else "validation")


def _is_printed(model: Any) -> bool:
    return not (isinstance(model, type) and issubclass(model, BaseModel)) or issubclass(model, documents.Document)
