"""The check of the cut, without any server."""

from hypothesis import given
from hypothesis import strategies as st

from gymckpt.coordination import Committed, Cut, ParticipantName, check_cut, ended_at_cut
from gymckpt.identity import EpisodeId
from gymckpt.storage.records import Needs

ENV: ParticipantName = ("environment", "env")
AGENT: ParticipantName = ("agent", "agent")
MODEL: ParticipantName = ("model", "policy")
TOOLS: ParticipantName = ("resources", "tools")
E1, E2, E3 = EpisodeId("r1"), EpisodeId("r2", 3), EpisodeId("r3")


def cut(
    committed: dict[ParticipantName, Committed],
    *,
    scope: tuple[EpisodeId, ...] = (E1,),
    restarts: dict[EpisodeId, str] | None = None,
    replied: tuple[EpisodeId, ...] = (),
) -> Cut:
    owners = dict.fromkeys(scope, ENV)
    return check_cut(owners=owners, committed=committed, restarts=restarts or {}, replied=replied)


def test_an_episode_is_continued_if_all_that_its_remaining_steps_call_hold_it() -> None:
    committed = {ENV: Committed([E1], {E1: (AGENT, TOOLS)}), AGENT: Committed([E1], {E1: ()}), TOOLS: Committed([E1])}
    assert cut(committed) == Cut((E1,), (), ())


def test_after_close_agent_the_agent_is_not_needed_and_at_return_nothing_is() -> None:
    assert cut({ENV: Committed([E1], {E1: (TOOLS,)}), AGENT: Committed([]), TOOLS: Committed([E1])}).continued == (E1,)
    assert cut({ENV: Committed([E1], {E1: ()}), AGENT: Committed([]), TOOLS: Committed([])}).continued == (E1,)


def test_a_needed_participant_that_lost_the_session_makes_it_a_restart() -> None:
    committed = {ENV: Committed([E1], {E1: (AGENT, TOOLS)}), AGENT: Committed([E1], {E1: ()}), TOOLS: Committed([])}
    assert cut(committed).restarted == ((E1, "missing_in:tools"),)


def test_what_the_agents_loop_needs_counts_too() -> None:
    committed = {
        ENV: Committed([E1], {E1: (AGENT,)}),
        AGENT: Committed([E1], {E1: (MODEL, TOOLS)}),
        TOOLS: Committed([E1]),
        MODEL: Committed([]),
    }
    assert cut(committed).restarted == ((E1, "missing_in:policy"),)


def test_an_agent_that_has_no_boundary_yet_still_counts_as_holding_its_session() -> None:
    committed = {ENV: Committed([E1], {E1: (AGENT,)}), AGENT: Committed([E1], {E1: None})}
    assert cut(committed).continued == (E1,)


def test_a_need_that_is_no_participant_here_is_missing() -> None:
    assert cut({ENV: Committed([E1], {E1: (("resources", "gone"),)})}).restarted == ((E1, "missing_in:gone"),)


def test_without_a_boundary_it_starts_over() -> None:
    assert cut({ENV: Committed([E1], {E1: None})}).restarted == ((E1, "no_boundary"),)


def test_an_episode_that_its_owner_does_not_list_has_ended_if_its_reply_came_and_is_lost_if_not() -> None:
    committed = {ENV: Committed([E3], {E3: ()})}
    assert ended_at_cut(dict.fromkeys((E1, E2, E3), ENV), committed) == (E1, E2)
    assert cut(committed, scope=(E1, E2, E3), replied=(E2,)) == Cut((E3,), ((E1, "no_reply"),), (E2,))


def test_restarts_are_listed_with_the_instance_that_cannot_capture_them() -> None:
    assert cut({ENV: Committed([])}, scope=(), restarts={E1: "shell"}).restarted == ((E1, "cannot_capture:shell"),)


EPISODES = [EpisodeId(f"r{number}") for number in range(4)]
NAMES = [AGENT, MODEL, TOOLS]


@given(
    held=st.fixed_dictionaries({name: st.sets(st.sampled_from(EPISODES)) for name in [ENV, *NAMES]}),
    needs=st.dictionaries(st.sampled_from(EPISODES), st.none() | st.lists(st.sampled_from(NAMES)).map(tuple)),
    loops=st.dictionaries(st.sampled_from(EPISODES), st.lists(st.sampled_from([MODEL, TOOLS])).map(tuple)),
    restarts=st.sets(st.sampled_from(EPISODES)),
    replied=st.sets(st.sampled_from(EPISODES)),
)
def test_every_episode_is_judged_once_and_none_is_continued_that_lacks_a_part(
    held: dict[ParticipantName, set[EpisodeId]],
    needs: dict[EpisodeId, Needs | None],
    loops: dict[EpisodeId, Needs],
    restarts: set[EpisodeId],
    replied: set[EpisodeId],
) -> None:
    committed = {name: Committed(episodes) for name, episodes in held.items()}
    committed[ENV] = Committed(held[ENV], needs)
    committed[AGENT] = Committed(held[AGENT], dict(loops))
    scope = {episode: ENV for episode in EPISODES if episode not in restarts}
    verdict = check_cut(owners=scope, committed=committed, restarts=dict.fromkeys(restarts, "shell"), replied=replied)
    judged = [*verdict.continued, *(episode for episode, _ in verdict.restarted), *verdict.ended]
    assert sorted(judged) == EPISODES
    for episode in verdict.continued:
        wanted = needs[episode]
        assert wanted is not None
        assert episode in held[ENV]
        for name in wanted:
            assert episode in held[name]
            if name == AGENT:
                assert all(episode in held[inner] for inner in loops.get(episode, ()))
    assert set(verdict.ended) <= replied - held[ENV]
