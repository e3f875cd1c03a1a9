"""NeMo Gym servers as participants of checkpoints, without a change to their code. Extra: `gymckpt[gym]`."""

from gymckpt.integrations.nemo_gym.adapters import Adapter, StatelessReplay
from gymckpt.integrations.nemo_gym.attaching import attach, participating

__all__ = ["Adapter", "StatelessReplay", "attach", "participating"]
