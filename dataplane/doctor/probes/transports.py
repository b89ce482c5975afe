"""What UCX sees: ``transports.py LIBUCT``. Asks libuct without opening an interface, which would listen.

Structures and calls are those of UCX's public header ``uct/api/uct.h``; they are the same in 1.12 to 1.22.
"""

import ctypes
import json
import sys
from ctypes import POINTER, Structure, byref, c_char, c_char_p, c_int, c_uint, c_uint8, c_uint64, c_void_p

_COUNT, _RESOURCES = 1 << 1, 1 << 2  # enum uct_component_attr_field
_KINDS = ("network", "shared memory", "accelerator", "loopback")  # uct_device_type_t


class _Domain(Structure):
    _fields_ = (("name", c_char * 16),)


class _Component(Structure):
    _fields_ = (
        ("field_mask", c_uint64),
        ("name", c_char * 16),
        ("count", c_uint),
        ("domains", POINTER(_Domain)),
        ("flags", c_uint64),
    )


class _Resource(Structure):
    _fields_ = (("transport", c_char * 10), ("device", c_char * 32), ("kind", c_int), ("system_device", c_uint8))


def main() -> None:
    """Print the resources as [{"transport", "device", "kind"}, ...]."""
    uct = ctypes.CDLL(sys.argv[1])
    components, count = POINTER(c_void_p)(), c_uint()
    if uct.uct_query_components(byref(components), byref(count)) != 0:
        raise SystemExit("uct_query_components failed")
    found = [resource for i in range(count.value) for resource in _resources(uct, c_void_p(components[i]))]
    json.dump(found, sys.stdout)


def _resources(uct: ctypes.CDLL, component: c_void_p) -> list[dict[str, str]]:
    about = _Component(field_mask=_COUNT)
    if uct.uct_component_query(component, byref(about)) != 0 or about.count == 0:
        return []
    domains = (_Domain * about.count)()
    about = _Component(field_mask=_RESOURCES, domains=domains)
    if uct.uct_component_query(component, byref(about)) != 0:
        return []
    found = []
    for domain in domains:
        config, opened = c_void_p(), c_void_p()
        if uct.uct_md_config_read(component, None, None, byref(config)) != 0:
            continue
        # The name as a pointer into the array: reading the field would copy it, and the copy may be too short-lived.
        name = c_char_p(domain.name)
        if uct.uct_md_open(component, name, config, byref(opened)) != 0:
            continue
        resources, count = POINTER(_Resource)(), c_uint()
        if uct.uct_md_query_tl_resources(opened, byref(resources), byref(count)) == 0:
            found += [_described(resources[i]) for i in range(count.value)]
    return found


def _described(resource: _Resource) -> dict[str, str]:
    kind = _KINDS[resource.kind] if 0 <= resource.kind < len(_KINDS) else "unknown"
    return {"transport": resource.transport.decode(), "device": resource.device.decode(), "kind": kind}


if __name__ == "__main__":
    main()
