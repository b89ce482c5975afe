"""On the path of every process of vLLM in these tests: no AMX, no AVX512-BF16.

Some hypervisors announce them and forbid their use; the first forward would end in SIGILL.
"""

import importlib.abc
import sys


class _BeforeVLLM(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):  # type: ignore[no-untyped-def]
        if fullname == "vllm":
            import torch

            sys.meta_path.remove(self)
            torch.cpu._is_amx_tile_supported = lambda: False
            torch.cpu._is_avx512_bf16_supported = lambda: False


sys.meta_path.insert(0, _BeforeVLLM())
