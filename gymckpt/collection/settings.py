"""Every setting of a collection, where its value came from, and whether it changes what the run means.

Command line > `GYMCKPT_...` > `.env` > `gymckpt.toml` or `[tool.gymckpt]` > default. Durations are seconds inside and
`30s`, `5m`, `2h` outside. Secrets appear in no file, log or error.
"""

from pathlib import Path
from typing import Any, Literal, Self, TypeAlias, cast, get_args

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from gymckpt.collection.options import Cadence, Counts, Duration, Every, Names, Pairs, Repeats

ENV_PREFIX = "GYMCKPT_"
MAX_REPEATS = 100_000
"""Of one task: its rows are planned together."""

Scope: TypeAlias = Literal["identity", "operational", "verb"]
"""What a setting decides. `identity`: what the run means, so another value is another run. `operational`: how it is
carried out, free to change at every start. `verb`: only what this one command does; stored nowhere."""


def _setting(default: Any, scope: Scope, description: str, **constraints: Any) -> Any:
    return Field(default, description=description, json_schema_extra={"scope": scope}, **constraints)


class Sampling(BaseModel):
    """Overrides of every row's `responses_create_params`. None = as the row says."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    temperature: float | None = Field(default=None, ge=0, allow_inf_nan=False, description="sampling temperature")
    top_p: float | None = Field(default=None, gt=0, le=1, description="nucleus sampling")
    max_output_tokens: int | None = Field(default=None, ge=1, description="tokens of one model call")
    params: dict[str, Any] = Field(default_factory=dict, description="any other parameter, by name")

    def overrides(self) -> dict[str, Any]:
        """What is laid over `responses_create_params`."""
        named = {"temperature": self.temperature, "top_p": self.top_p, "max_output_tokens": self.max_output_tokens}
        return {**self.params, **{name: value for name, value in named.items() if value is not None}}


class CollectSettings(BaseSettings):
    """All settings of `collect` and `restore`, resolved: what was not given holds its default."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True, env_prefix=ENV_PREFIX, env_nested_delimiter="__")

    # What to collect: the meaning of the run.
    tasks: str | None = _setting(
        None, "identity", "task rows: a .jsonl(.gz|.zst) file, - for stdin, or a bundled set @name"
    )
    limit: int | None = _setting(None, "identity", "only so many tasks, after a shuffle", ge=1)
    shuffle: bool = _setting(False, "identity", "shuffle the tasks with --seed")
    seed: int = _setting(0, "identity", "seed of the shuffle", ge=0)
    repeats: Repeats = _setting({"*": 1}, "identity", "rollouts a task: a number, or AGENT=N pairs")
    agent: str | None = _setting(None, "identity", "agent of flat rows that name none")
    routes: Pairs = _setting({}, "identity", "TASKSET=INSTANCE: which environment server runs which task set")
    model: str | None = _setting(None, "identity", "name of the policy model")
    sampling: Sampling = _setting(Sampling(), "identity", "overrides of sampling parameters")
    cohort: str | None = _setting(None, "identity", "field whose equal values make rows one cohort, counted as a whole")

    # Where the servers are.
    url: Pairs = _setting({}, "operational", "NAME=URL: a server by its instance name")
    gym_head: str | None = _setting(None, "operational", "URL of a Gym head server that lists the servers")
    serve: bool = _setting(False, "operational", "start the bundled servers for this command")
    serve_config: Path | None = _setting(None, "operational", "deployment file of the bundled servers")
    backend_url: str | None = _setting(None, "operational", "OpenAI-compatible backend of the policy model server")
    control_token: SecretStr | None = _setting(None, "operational", "bearer token of the control plane")
    control_token_file: Path | None = _setting(None, "operational", "file that holds the control token")
    path_map: Pairs = _setting({}, "operational", "LOCAL=REMOTE: where servers see a path of this machine")
    restart_servers: bool = _setting(True, "operational", "start a bundled server again when it dies")

    # How it is carried out.
    run_dir: Path | None = _setting(None, "operational", "the run directory; runs/<utc>-<id> if not given")
    concurrency: int = _setting(64, "operational", "rollouts in flight", ge=1, le=100_000)
    agent_concurrency: Counts = _setting({}, "operational", "AGENT=N: rollouts in flight for one agent or environment")
    max_attempts: int = _setting(3, "operational", "failures of a rollout before it has failed", ge=1)
    rollout_timeout: Duration = _setting(7200.0, "operational", "time for one attempt, closed times left out", gt=0)
    control_timeout: Duration = _setting(30.0, "operational", "time for a control call", gt=0)
    server_timeout: Duration = _setting(
        600.0, "operational", "how long a server may be gone before the run stops", gt=0
    )
    group_readable: bool = _setting(False, "operational", "files 0640 and directories 0750")

    # Checkpoints.
    checkpoint_every: Cadence = _setting(Every(300.0), "operational", "5m, 200ep, 5m,200ep or off")
    checkpoint_timeout: Duration = _setting(30.0, "operational", "time for all servers to be ready", gt=0)
    commit_timeout: Duration = _setting(600.0, "operational", "time for all servers to write", gt=0)
    restore_timeout: Duration = _setting(600.0, "operational", "time for all servers to install", gt=0)
    keep: int = _setting(2, "operational", "unnamed checkpoints kept", ge=1)
    max_checkpoint_failures: int | None = _setting(None, "operational", "stop after so many failures in a row", ge=1)
    grace: Duration = _setting(25.0, "operational", "time for the last checkpoint after SIGTERM or Ctrl-C", ge=0)

    # This command only.
    resume: bool = _setting(False, "verb", "go on where the run directory stands; begins an empty one")
    overwrite: bool = _setting(False, "verb", "delete the run that the directory holds, then begin")
    start_over: bool = _setting(False, "verb", "no restore: unfinished rollouts start from the input again")
    salvage: bool = _setting(False, "verb", "restore what is whole of a damaged checkpoint")
    steal_lock: bool = _setting(False, "verb", "take the run from a holder that seems alive")
    accept_change: Names = _setting((), "verb", "identity fields that may differ from the run's")
    dry_run: bool = _setting(False, "verb", "check everything, send nothing")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for agent, count in self.repeats.items():
            if not 1 <= count <= MAX_REPEATS:
                raise ValueError(f"repeats: {agent}={count} is not from 1 to {MAX_REPEATS}")
        for agent, count in self.agent_concurrency.items():
            if count < 1:
                raise ValueError(f"agent_concurrency: {agent}={count} is below 1")
        if self.overwrite and self.resume:
            raise ValueError("overwrite and resume contradict each other")
        for name, url in self.url.items():
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"url: {name}={url!r} is not an http(s) URL")
            if "@" in url:
                raise ValueError(f"url: {name} holds a user or password: give secrets by environment, not in URLs")
            if "?" in url or "#" in url:
                raise ValueError(f"url: {name} has a query or a fragment: give the server's base URL")
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        # `origins.load` reads every source itself, so that it can say where a value came from.
        return (init_settings,)

    def token(self) -> SecretStr | None:
        """The control token: given, or read from its file (a final newline is not part of it); raises `OSError`."""
        if self.control_token is None and self.control_token_file is not None:
            return SecretStr(self.control_token_file.read_text("utf-8").strip())
        return self.control_token


def scope_of(name: str) -> Scope:
    """What the setting `name` decides."""
    extra = CollectSettings.model_fields[name].json_schema_extra
    scope = extra.get("scope") if isinstance(extra, dict) else None
    for known in get_args(Scope):
        if scope == known:
            return cast(Scope, known)
    raise LookupError(f"setting {name!r} does not say what it decides")


def stored(settings: CollectSettings) -> dict[str, Any]:
    """What run.json keeps: identity and operational settings as JSON, without secrets and the run's own path."""
    left_out = {name for name in CollectSettings.model_fields if scope_of(name) == "verb"}
    left_out |= {"control_token", "control_token_file", "run_dir"}
    return settings.model_dump(mode="json", exclude=left_out)
