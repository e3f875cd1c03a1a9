"""Servers found through a Gym head server."""

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from commands import heads
from gymckpt.collection.processes import Mark, Processes
from gymckpt.collection.routing import Server
from gymckpt.errors import ServerError
from gymckpt.ports import ServerRef

CONFIGURATION = """
tea_shop:
  resources_servers:
    shop: {host: 127.0.0.1, port: 7001, judge: {model: {type: responses_api_models, name: policy_model}}}
tea_agent:
  responses_api_agents:
    simple_agent: {host: 127.0.0.1, port: 7002, model_server: {type: responses_api_models, name: policy_model}}
tea_environment:
  environment_servers:
    legacy_agent: {port: 7003, agent_server: {type: responses_api_agents, name: tea_agent}}
policy_model:
  responses_api_models:
    openai_model: {port: 7004, openai_api_key: not-for-your-eyes}
some_setting: 3
"""


def _instance(process: str, name: str, section: str, port: int) -> dict[str, Any]:
    url = f"http://127.0.0.1:{port}"
    return {"name": name, "process_name": process, "server_type": section, "url": url, "pid": 1, "status": None}


LISTED = [
    _instance("tea_shop", "shop", "resources_servers", 7001),
    _instance("tea_agent", "simple_agent", "responses_api_agents", 7002),
    _instance("tea_environment", "legacy_agent", "environment_servers", 7003),
    _instance("policy_model", "openai_model", "responses_api_models", 7004),
]


def test_servers_go_by_the_names_that_rows_use_with_kinds_and_bindings() -> None:
    assert heads.read_servers(LISTED, CONFIGURATION, "http://head") == (
        Server(ServerRef("tea_shop", "http://127.0.0.1:7001"), "resources", models=frozenset({"policy_model"})),
        Server(ServerRef("tea_agent", "http://127.0.0.1:7002"), "agent"),
        Server(ServerRef("tea_environment", "http://127.0.0.1:7003"), "environment", "tea_agent"),
        Server(ServerRef("policy_model", "http://127.0.0.1:7004"), "model"),
    )


@pytest.mark.parametrize(("listed", "configured"), [(3, ""), ([{"name": "x"}], ""), ([], "a: ["), ([], "text")])
def test_what_is_no_head_server_is_named(listed: Any, configured: Any) -> None:
    with pytest.raises(ServerError, match="http://head does not describe its servers"):
        heads.read_servers(listed, configured, "http://head")


class _Head(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        answers = {"/server_instances": LISTED, "/global_config_dict_yaml": CONFIGURATION}
        known = self.path in answers
        data = json.dumps(answers.get(self.path)).encode()
        self.send_response(200 if known else 404)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name is the base class's
        return


def test_a_head_is_asked_over_http() -> None:
    with HTTPServer(("127.0.0.1", 0), _Head) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_port}/"
            found, _ = asyncio.run(heads.servers_of(url))
            with pytest.raises(ServerError, match="answered HTTP 404"):
                asyncio.run(heads.servers_of(url + "nothing"))
        finally:
            server.shutdown()
            thread.join()
    assert [one.ref.instance for one in found] == ["tea_shop", "tea_agent", "tea_environment", "policy_model"]


@pytest.mark.parametrize("other", [(2, 7.0), (1, 8.0), (None, None)], ids=["pid", "start time", "not listed"])
def test_a_server_listed_with_another_process_was_replaced_until_that_is_accepted(other: Mark) -> None:
    listed: dict[str, Mark] = {"tea_shop": (1, 7.0), "tea_agent": (1, 7.0)}

    async def read() -> dict[str, Mark]:
        return dict(listed)

    async def look() -> list[tuple[str, ...]]:
        processes = Processes({"tea_shop": (1, 7.0), "tea_agent": (1, 7.0), "policy_model": (None, None)}, read)
        names = ["tea_shop", "policy_model"]
        seen = [await processes.replaced(names)]
        listed["tea_shop"] = other
        seen.append(await processes.replaced(names))
        seen.append(await processes.replaced(names))
        processes.accept()
        seen.append(await processes.replaced(names))
        return seen

    assert asyncio.run(look()) == [(), ("tea_shop",), ("tea_shop",), ()]
