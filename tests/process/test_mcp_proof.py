"""The main proof once more, with an agent that reaches its tools over MCP: nothing is different."""

from pathlib import Path
from typing import Any

import pytest

from tests.process.deployments import Site
from tests.process.test_main_proof import Reference, prove, undisturbed

__all__ = ["undisturbed"]

pytest.importorskip("mcp", reason="the extra mcp is not installed")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_tools_over_mcp_survive_kills_of_everything_as_tools_over_plain_http_do(
    tmp_path: Path, undisturbed: Reference
) -> None:
    over_mcp: dict[str, dict[str, Any]] = {
        "environment": {"resources_tool_transports": ["mcp"]},
        "workbench": {"expose_tools_over_mcp": True},
    }
    prove(Site(tmp_path).prepare(**over_mcp), 2, undisturbed)
