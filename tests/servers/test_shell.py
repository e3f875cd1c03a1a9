"""The shell server: real shells, killed with all they started, also when the server dies."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from gymckpt.ports import SystemClock, ThreadOffload
from gymckpt.servers.resources.server import Call, Seed, Verification
from gymckpt.servers.resources.shell import Shell, ShellOptions
from gymckpt.servers.resources.shell_process import MAX_OUTPUT_BYTES, Ran, ShellProcess
from gymckpt.tasksets import task_rows
from tests.process.processes import descendants, wait_gone
from tests.servers.worked import Worked


async def lines(*texts: str, limit_s: float = 20.0) -> list[Ran]:
    shell = await ShellProcess.start(ThreadOffload())
    try:
        return [await shell.run(text, limit_s) for text in texts]
    finally:
        await shell.kill()


def test_a_shell_keeps_its_variables_and_directory_from_line_to_line() -> None:
    ran = asyncio.run(lines("x=3; mkdir d", "cd d", 'basename "$PWD"; echo $((x + 4))'))
    assert ran[-1] == Ran("d\n7\n", 0)


def test_a_line_answers_with_both_streams_and_its_status() -> None:
    assert asyncio.run(lines("echo out; echo err >&2; (exit 3)")) == [Ran("out\nerr\n", 3)]


def test_a_line_cannot_read_what_comes_after_it() -> None:
    assert asyncio.run(lines("cat; read -r x; echo got $x", "echo next")) == [Ran("got\n", 0), Ran("next\n", 0)]


def test_an_open_quote_ends_at_most_this_shell() -> None:
    ran = asyncio.run(lines("echo 'open"))
    assert ran[0].status != 0


def test_much_output_is_cut_and_does_not_hold_up_the_next_line() -> None:
    ran = asyncio.run(lines("yes | head -c 3000000", "echo next"))
    assert len(ran[0].output) == MAX_OUTPUT_BYTES
    assert ran[1] == Ran("next\n", 0)


def test_a_shell_sees_nothing_of_our_environment() -> None:
    os.environ["GYMCKPT_TEST_SECRET"] = "hidden"
    try:
        assert "hidden" not in asyncio.run(lines("set; env"))[0].output
    finally:
        del os.environ["GYMCKPT_TEST_SECRET"]


def test_a_line_that_takes_too_long_ends_the_shell_and_what_it_started() -> None:
    async def main() -> list[int]:
        shell = await ShellProcess.start(ThreadOffload())
        assert (await shell.run("sleep 1000 &", 20.0)).status == 0
        family = descendants(shell.pid)
        assert (await shell.run("sleep 2000", 0.2)).status is None
        assert (await shell.run("echo still", 20.0)).status is None
        return family

    family = asyncio.run(main())
    assert len(family) >= 3
    wait_gone(family)


_SERVER = """
import asyncio
from gymckpt.ports import ThreadOffload
from gymckpt.servers.resources.shell_process import ShellProcess
async def main():
    shell = await ShellProcess.start(ThreadOffload())
    where = await shell.run("pwd; sleep 1000 >&- &", 20.0)
    print(shell.pid, where.output.strip(), flush=True)
    await shell.run("sleep 2000", 100.0)
asyncio.run(main())
"""


def test_a_killed_server_leaves_no_shell_and_no_directory_behind() -> None:
    server = subprocess.Popen([sys.executable, "-c", _SERVER], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    pid, directory = server.stdout.readline().split()
    family = descendants(int(pid))
    assert len(family) >= 3
    assert Path(directory).is_dir()
    server.send_signal(signal.SIGKILL)
    server.wait()
    server.stdout.close()
    wait_gone(family)
    assert not Path(directory).exists()


def test_the_scripted_policy_does_most_tasks_in_live_shells_of_which_nothing_stays() -> None:
    async def main() -> list[float]:
        shell = Shell("shell", ShellOptions(), clock=SystemClock(), offload=ThreadOffload())
        tools = shell.tools()

        async def use(name: str, arguments: dict[str, Any]) -> Any:
            return await tools[name](Call("session", None), **arguments)

        rewards = []
        for row in task_rows("shell"):
            worked = Worked(row, row["task_id"]["task_id"])
            await shell.seed_session(Seed("session", None, worked.task_data))
            assert await worked.go(use)
            rewards.append((await shell.verify(Verification("session", worked.verify_body)))["reward"])
            family = descendants(shell._terminals["session"].shell.pid)
            await shell.retire_session_state("session")
            await shell.retire_session_state("session")
            wait_gone(family)
        return rewards

    rewards = asyncio.run(main())
    assert 0.7 <= sum(rewards) / len(rewards) < 1.0


def test_a_total_that_is_only_in_the_file_is_not_enough() -> None:
    async def main() -> float:
        shell = Shell("shell", ShellOptions(), clock=SystemClock(), offload=ThreadOffload())
        await shell.seed_session(Seed("session", None, {}))
        await shell.tools()["run_line"](Call("session", None), line="echo 55 > result.txt")
        body = {"file": "result.txt", "expected_text": "55", "response": {}}
        verdict = await shell.verify(Verification("session", body))
        await shell.shutdown()
        reward: float = verdict["reward"]
        return reward

    assert asyncio.run(main()) == 0.0
