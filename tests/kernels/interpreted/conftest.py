"""These tests run kernels in Triton's interpreter, which must be chosen before Triton is imported: in a process of their own.

``tests/kernels/test_interpreter.py`` starts that process. By hand: TRITON_INTERPRET=1 python -m pytest tests/kernels/interpreted
"""

from __future__ import annotations

from minillm.kernels import interpreted

collect_ignore_glob = [] if interpreted() else ["*.py"]
