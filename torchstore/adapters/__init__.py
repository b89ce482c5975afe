"""The interfaces for engines and frameworks: weight transfer for vLLM, TRL and verl, and Ray's tensors.

`torchstore.adapters.vllm`, `.trl`, `.verl` and `.ray` import those projects, so nothing here imports them: vLLM loads
`register_vllm` as a plugin, verl imports its module by the name that its configuration gives, a script that uses Ray
calls `register_ray`, and one that uses TRL imports its class.
"""

from skipper.torchstore.adapters.registration import register_ray, register_vllm

__all__ = ["register_ray", "register_vllm"]
