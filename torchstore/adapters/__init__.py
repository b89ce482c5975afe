"""Weight transfer for inference engines: what vLLM and verl call, made of the store's puts and gets.

`torchstore.adapters.vllm` and `torchstore.adapters.verl` import those projects, so nothing here imports them: vLLM
loads `register_vllm` as a plugin, and verl imports its module by the name that its configuration gives.
"""

from skipper.torchstore.adapters.registration import register_vllm

__all__ = ["register_vllm"]
