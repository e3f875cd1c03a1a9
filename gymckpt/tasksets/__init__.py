"""The bundled task sets, and the scripted policy that knows how to work on them.

Pure Python without servers, so that the collector lists rows and the scripted worker answers them from one place.
"""

from gymckpt.tasksets.rows import TASKSETS, task_rows

__all__ = ["TASKSETS", "task_rows"]
