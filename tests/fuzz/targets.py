"""The registry: every entry that takes bytes of others, a line for each.

Name, function, seeds, the exceptions that it may raise, and a mutator where bytes are not it. What is opened only
between processes of one job may raise what Python raises; it must still not crash, hang, or take memory.
"""

from skipper.benchmarks.errors import UsageError
from skipper.control.model.errors import HostError, JobNotFoundError, ProtocolError, ServiceUrlError, WorkspaceError
from skipper.control.rpc.encoding import ArgumentsError
from skipper.control.rpc.wire.session import BadAnswerError, Refused
from skipper.control.wire.frames import decode_process
from skipper.control.wire.local_stream import unpack_metadata
from skipper.dataplane.errors import BufferDroppedError, DataplaneError, DescriptorError, TransferError
from skipper.torchstore.errors import (
    CertificateFormatError,
    LoadPlanFormatError,
    MirrorFormatError,
    MirrorSignatureError,
    StoreError,
    StoreRendezvousError,
)
from skipper.torchstore.spmd.launch import parse_note
from tests.fuzz import handshakes, messages, moves, services, stores, wire, workspaces
from tests.fuzz.mutation import mutate_json
from tests.fuzz.target import Target

_OF_THE_JOB = (ValueError, TypeError, LookupError, RuntimeError, StoreError, DataplaneError)
_FORMS = (KeyError, ValueError, TypeError, AttributeError, OverflowError)

TARGETS = (
    # Links
    Target("frames", wire.feed_frames, wire.frame_seeds, (ProtocolError,)),
    Target("process", decode_process, wire.process_seeds, (ProtocolError,)),
    Target("answers", wire.unpack_answers, wire.answers_seeds, (ProtocolError,)),
    Target("opening", wire.open_route, wire.opening_seeds, (ProtocolError,), mutate_json),
    Target("metadata", unpack_metadata, wire.metadata_seeds, (ProtocolError,)),
    Target("guest", wire.meet_guest, wire.guest_seeds),
    Target("guest-that-proves", wire.meet_guest_that_proves, wire.proving_guest_seeds),
    Target("host", wire.meet_host, wire.host_seeds),
    Target("address", wire.parse_address, wire.address_seeds, (ValueError,)),
    # Files, and agents
    Target("announcement", wire.read_announcement, wire.announcement_seeds, (HostError,), mutate_json),
    Target("join-file", wire.read_join_file, wire.join_file_seeds, (JobNotFoundError,), mutate_json),
    Target("gate", wire.read_gates_answer, wire.gates_answer_seeds, (HostError,), mutate_json),
    Target("agent", wire.read_agents_words, wire.agents_words_seeds, (HostError,), wire.mutate_words),
    Target("pod", services.read_pod, services.pod_seeds, _FORMS, mutate_json),
    Target("slurm", services.read_queue, services.queue_seeds),
    Target("workspace", workspaces.sync, workspaces.seeds, (WorkspaceError, OSError), mutate_json),
    # Actor servers and names
    Target("actor-message", wire.decode_actor_message, wire.actor_message_seeds, (ProtocolError,)),
    Target("request", wire.accept_bytes, wire.request_seeds, (Refused, BadAnswerError)),
    Target("altered-request", wire.accept_request, wire.session_seeds, (Refused,)),
    Target("arguments", services.decode_arguments, services.arguments_seeds, (ArgumentsError,), mutate_json),
    Target("url", services.parse_url, services.url_seeds, (ServiceUrlError,)),
    Target("name", services.check_name, services.name_seeds, (ValueError,)),
    Target("register", services.register, services.register_seeds, services.REGISTER_ERRORS, mutate_json),
    Target("machine", services.resolve_machine, services.machine_seeds, services.RESOLVER_ERRORS, mutate_json),
    # Pages and lines
    Target("page", services.ask_for_page, services.page_seeds),
    Target("lines", services.collect_lines, services.lines_seeds),
    Target("pipes", services.hand_in_pipes, services.pipes_seeds, (), mutate_json),
    Target("log-files", services.read_log_files, services.log_files_seeds),
    Target("log-processes", services.read_log_processes, services.log_processes_seeds, (), mutate_json),
    # The data plane
    Target("handle", moves.read_handle, moves.handle_seeds, (DescriptorError,)),
    Target("signed-handle", moves.read_signed_handle, moves.signed_handle_seeds, (DescriptorError,)),
    Target("shared-memory", moves.resolve_shared, moves.resolve_shared_seeds, (DataplaneError,)),
    Target("shared-header", moves.attach_shared, moves.attach_shared_seeds, (BufferDroppedError,)),
    Target("ucx-owner", messages.ask_owner, messages.owner_seeds),
    Target("ucx-admission", handshakes.ask_for_admission, handshakes.admission_seeds),
    Target("ucx-initiator", handshakes.answer_initiator, handshakes.answer_initiator_seeds, (TransferError,)),
    Target("exchange", handshakes.change_handshake, handshakes.change_handshake_seeds),
    Target("verbs-owner", handshakes.meet_owner, handshakes.meet_owner_seeds),
    Target("verbs-initiator", handshakes.meet_initiator, handshakes.meet_initiator_seeds, (TransferError,)),
    Target("verbs-endpoints", handshakes.read_endpoints, lambda: [bytes(70)]),
    # Stores
    Target("board", stores.read_board, stores.board_seeds, _OF_THE_JOB),
    Target("manifest", stores.read_manifest, stores.manifest_seeds, _OF_THE_JOB, mutate_json),
    Target("inline", stores.read_inline, stores.inline_seeds, (*_OF_THE_JOB, AttributeError), mutate_json),
    Target("flags", stores.read_flags, stores.flags_seeds, _OF_THE_JOB),
    Target("load-plan", stores.read_load_plan, stores.load_plan_seeds, (LoadPlanFormatError,)),
    Target("certificate", stores.read_certificate, stores.certificate_seeds, (CertificateFormatError,)),
    Target("weights-tag", stores.read_tag, stores.tag_seeds, (), mutate_json),
    Target("mirror-seal", stores.read_seal, stores.seal_seeds, (MirrorSignatureError,)),
    Target("mirror-manifest", stores.read_mirror, stores.mirror_seeds, (MirrorFormatError,), mutate_json),
    Target("mirror-latest", stores.read_mirror_latest, stores.mirror_latest_seeds, (MirrorFormatError,), mutate_json),
    Target("listed-model", stores.list_model, stores.list_model_seeds, (UsageError,), mutate_json),
    Target("note", parse_note, stores.note_seeds, (StoreRendezvousError,), mutate_json),
)
