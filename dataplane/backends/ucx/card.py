"""What a handle's card says for UCX: how to reach the owner's worker, and its page of epoch words."""

import struct
from dataclasses import dataclass
from typing import Self

from skipper.dataplane.backends.ucx import packed
from skipper.dataplane.backends.ucx.admission import Contact
from skipper.dataplane.epochs import PAGE_BYTES
from skipper.dataplane.errors import DescriptorError
from skipper.dataplane.handle import ADDRESSES, UCX, Card, unpack_section

HEAD = struct.Struct("<QI")  # the page's address and descriptor; then, by `packed`, its key, the contact, the worker


@dataclass(frozen=True, slots=True)
class UcxCard:
    """The UCX section of a card.

    Attributes:
        page_address: Where the page of epoch words begins in the owner.
        page_fd: Its descriptor there.
        page_key: Its packed key.
        contact: Where to ask before connecting over TCP; None where UCX does not listen on TCP.
        worker: Address of the owner's worker, with its segments (see `segments`).
    """

    page_address: int
    page_fd: int
    page_key: bytes
    contact: Contact | None
    worker: bytes

    def pack(self) -> bytes:
        """The section."""
        contact = b"" if self.contact is None else self.contact.pack()
        return HEAD.pack(self.page_address, self.page_fd) + packed.pack(self.page_key, contact, self.worker)

    @classmethod
    def of(cls, card: Card) -> Self:
        """The UCX section of a card that has one.

        Raises:
            DescriptorError: It is damaged.
        """
        section = card.sections[UCX]
        page_address, page_fd = unpack_section(HEAD, section, "UCX")
        if page_address + PAGE_BYTES > ADDRESSES:
            raise DescriptorError(f"this buffer handle has its epoch page at {page_address:#x}, where no memory can be")
        key, contact, worker = packed.unpack(section[HEAD.size :], 3)
        packed.require_key(key)
        if not worker:
            raise DescriptorError("this buffer handle has a damaged section for UCX")
        return cls(page_address, page_fd, key, Contact.parse(contact), worker)
