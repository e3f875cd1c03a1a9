"""Settings that more than one room reads. Unknown keys are refused everywhere."""

from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator


class Settings(BaseModel):
    """A block of settings."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class CheckpointSettings(Settings):
    """The `checkpoint:` block of a participant. Disabled means: no route, no middleware, no bookkeeping, no header."""

    enabled: bool = False
    control_auth_token: SecretStr | None = None
    """Bearer token of the control plane; required when enabled."""
    lease_grace_seconds: float = Field(default=600.0, gt=0, le=86_400)
    """How long after a control call's deadline a closed participant waits for its controller before it opens itself."""
    root: Path | None = None
    """Checkpoint directories that a commit or restore may name lie under it; required beyond loopback."""
    max_record_bytes: int = Field(default=1 << 30, ge=1 << 10)
    """A record whose JSON is larger than this is refused, in writing and in reading."""
    compression_level: int = Field(default=1, ge=1, le=19)
    """zstd level of segments."""
    workers: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.enabled and (self.control_auth_token is None or not self.control_auth_token.get_secret_value()):
            raise ValueError("checkpoint.control_auth_token is required when checkpoint.enabled is true")
        if self.workers > 1:
            raise ValueError("checkpoint.workers > 1 is not supported yet: run one worker per server")
        return self
