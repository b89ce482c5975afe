"""A mirror in S3: its real protocol, spoken by s3fs with a server on the loopback."""

import pytest
import torch

from skipper import torchstore as ts
from tests.torchstore.mirror.places import mirror_at, reader_at

moto_server = pytest.importorskip("moto.server", reason="no moto: its botocore and kubernetes want different dateutils")
s3fs = pytest.importorskip("s3fs", reason="no s3fs: its botocore and kubernetes want different dateutils")

pytestmark = [
    pytest.mark.usefixtures("store"),
    pytest.mark.filterwarnings("ignore:::botocore|moto|werkzeug|aiobotocore"),
]


async def test_versions_in_s3_are_written_once_and_read_by_what_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "anything")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        options = {"client_kwargs": {"endpoint_url": f"http://{host}:{port}"}}
        s3fs.S3FileSystem(**options).mkdir("bucket")
        weight, mine = torch.randn(300, 200), {"w": torch.zeros(300, 200)}
        with mirror_at("s3://bucket/run", keep=1, options=options) as mirror:
            with reader_at("s3://bucket/run", options=options) as reader:
                for _ in range(3):
                    weight[3] += 1
                    await ts.put_state_dict({"w": weight}, "policy")
                    number = await mirror.publish()
                    await reader.get_state_dict(mine, delta=True)
                    assert torch.equal(mine["w"], weight)
                assert reader.last_read is not None
                assert 0 < reader.last_read.chunks < reader.last_read.skipped_chunks
            files = mirror._files
            assert not files.create(files.version(number), b"another")
            assert (files.versions(), await mirror.sweep()) == ([number], 0)
            lost = min(files.chunks())
            files.remove(files.chunk(lost))
        with reader_at("s3://bucket/run", options=options) as reader, pytest.raises(ts.MirrorDamagedError, match=lost):
            await reader.get_state_dict()
    finally:
        server.stop()
