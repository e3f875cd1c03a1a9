"""`gymckpt status` against servers that are there, and ones that are not."""

import json
import socket

from tests.cli.terminal import gymckpt

TOKEN = {"GYMCKPT_CONTROL_TOKEN": "a-token-for-tests"}


def test_a_server_that_is_not_there_is_part_of_the_answer_and_exit_5() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        done = gymckpt("status", "--json", "--url", f"agent={url}", env=TOKEN)
    assert done.returncode == 5
    (server,) = json.loads(done.stdout)["servers"]
    assert server["instance"] == "agent"
    assert "refused" in server["problem"]


def test_without_a_server_it_says_how_to_name_one() -> None:
    done = gymckpt("status", env=TOKEN)
    assert done.returncode == 2
    assert "--url NAME=URL" in done.stderr
