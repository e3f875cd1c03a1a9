"""Which of NeMo Gym's verifiers are safe to capture as stateless and to ask again, each as its source was reviewed.

A declaration counts only while the source is the one that was reviewed: for another source, and for any class that is
not here, the server is `restart_only`, which is always right. The digest covers every Python file of the server's own
folder but its tests.
"""

import hashlib
import inspect
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from gymckpt.integrations.nemo_gym.adapters import ADAPTERS, Adapter, ComparedCohorts, StatelessReplay

log = logging.getLogger(__name__)

REVIEWED = "nemo-gym 0.7.0"


class Declaration(NamedTuple):
    """What was found of one class."""

    adapter: type[Adapter]
    source_sha256: str


def class_key(server_class: type) -> str:
    """`module:class`, the name under which a class is declared."""
    return f"{server_class.__module__}:{server_class.__qualname__}"


def source_sha256(folder: Path) -> str:
    """Digest of a server's Python files."""
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        name = file.relative_to(folder)
        if name.parts[0] != "tests":
            content = file.read_bytes()
            digest.update(f"{name.as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def adapter_for(server_class: type) -> type[Adapter]:
    """The adapter declared for this very class; `Adapter` (restart_only) if there is none, or it was changed since."""
    key = class_key(server_class)
    declared = DECLARATIONS.get(key)
    if declared is None:
        return Adapter
    source = source_sha256(Path(inspect.getfile(server_class)).parent)
    if source != declared.source_sha256:
        log.warning("%s is not the source that was reviewed (%s): its episodes start over after a crash", key, REVIEWED)
        return Adapter
    return declared.adapter


COHORTS = frozenset({"resources_servers.genrm_compare.app:GenRMCompareResourcesServer"})
"""Verifiers that compare the answers to one prompt with each other."""

VERIFIERS: Mapping[str, str] = {
    "resources_servers.abstention.app:AbstentionServer": (
        "9fbfd84fe473721e3a2d47ca8e48034d857e404eaafb5ebf848a0f4dc212ac26"
    ),
    "resources_servers.calendar.app:CalendarResourcesServer": (
        "23ea909d25a6f95d022e7a6f53effd7d66f3f7b7e3157af7be82f726a555d938"
    ),
    "resources_servers.code_gen.app:CompCodingResourcesServer": (
        "0e472e0d236148c4591b9cc20d6a0115588633588310a074364800689945ea08"
    ),
    "resources_servers.competitive_coding_challenges.app:CompetitiveCodingChallengesResourcesServer": (
        "5a2f957c625adf1d2d77f683b6adc2515d318b8ce4cd42fdb235f410e7d45268"
    ),
    "resources_servers.equivalence_llm_judge.app:LLMJudgeResourcesServer": (
        "6052fd5373b75de48ed2dc6a7908910ec757329cca78715e5803f8298bfaa18e"
    ),
    "resources_servers.equivalence_rule.app:EquivalenceRuleResourcesServer": (
        "0368f88bf91f97e6c17a05a952c3357b66cd1ac9a7fd60b63b0552d3f34a37b9"
    ),
    "resources_servers.ether0.app:Ether0ResourcesServer": (
        "9cac910e135dac1f486195be3bda348e13e84f8582e961b9378d9e1a699cf00a"
    ),
    "resources_servers.format_verification.app:FormatVerificationResourcesServer": (
        "e072aaf8e23ebdc6b7f1e0b35c122c2ab4bf44e3858221c72e46cdedc890f5ea"
    ),
    "resources_servers.genrm_compare.app:GenRMCompareResourcesServer": (
        "3e5edd3a3aad91438cf2a7fa403452b045ec6ee6948a20dfeca94696cd14aeff"
    ),
    "resources_servers.instruction_following.app:InstructionFollowingResourcesServer": (
        "e3639e14c50574e5d82a1205bb666c63f099232ce28cf47c95051044e86719a8"
    ),
    "resources_servers.inverse_if.app:InverseIFServer": (
        "c619dbec71c769371c78aa36835c674edd2dcd8aae1ba5908ed04fb700b9a3d2"
    ),
    "resources_servers.jailbreak_detection.app:JailbreakDetectionResourcesServer": (
        "2446bab70f95c35c1d0168af2aae99e284846379e98881aa3436830a1d547cfd"
    ),
    "resources_servers.math_with_judge.app:LibraryJudgeMathResourcesServer": (
        "e235ae3a4e3e78233725b253d9400688a99a1f7572709ee11575da2d591a6b71"
    ),
    "resources_servers.mcqa.app:MCQAResourcesServer": (
        "b8a9073d347799bdfc58e37bd7bef3cd1ff2f16c70111c6ea156e598413a79f8"
    ),
    "resources_servers.multichallenge.app:MultiChallengeServer": (
        "7f52647205dbdeb7033565f408f09b043e67770962f3e989a44473ea9184f4df"
    ),
    "resources_servers.nvarc.app:NVARCResourcesServer": (
        "62a8bf35bf57e2335589cc6e50224e21c0fc1511543eb643b80c2126fdd8785c"
    ),
    "resources_servers.reasoning_gym.app:ReasoningGymResourcesServer": (
        "8c4952411c5a906e3b373cf77e88b7948b69f6f5bf02f0722e885ce0d5987d9f"
    ),
    "resources_servers.string_match.app:StringMatchResourcesServer": (
        "e6f3bd804cc8be1417b650d3ca0b4a98ccf18e7a2e7c16cd793d930ad9dc0980"
    ),
    "resources_servers.structured_outputs.app:StructuredOutputsResourcesServer": (
        "ce282084a8781ab2898cadf26e1a5c029af5731b71018c179e9b5f92244ed992"
    ),
    "resources_servers.terminus_judge.app:TerminusJudgeResourcesServer": (
        "436744c9ae039aaafe79affd796a9132af3b5f948d9d78664b61d6723aa9b818"
    ),
}
"""`module:class` of the verifiers, and the digest of the source that was reviewed. All look at the answer alone;
a repeated judge call may give another verdict: asking again is safe, not sure to say the same."""

STATEFUL: Mapping[str, str] = {
    "resources_servers.blackjack.app:BlackjackEnv": (
        "63aa366124cfe27bfcfb7c737c21dda6baf83901cf91d5baafeb99398c0fb919"
    ),
    "resources_servers.example_session_state_mgmt.app:StatefulCounterResourcesServer": (
        "b8ab730f3c44975592dcabb75069cc1fe4ab6181d9b5da60d04163cc0bdd0bfa"
    ),
}
"""Classes with an adapter of their own."""

DECLARATIONS: Mapping[str, Declaration] = {
    **{
        key: Declaration(ComparedCohorts if key in COHORTS else StatelessReplay, source)
        for key, source in VERIFIERS.items()
    },
    **{key: Declaration(ADAPTERS[key], source) for key, source in STATEFUL.items()},
}
"""Everything that is declared, by `module:class`."""
