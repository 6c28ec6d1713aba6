"""Plain data between the ranks of a transfer."""

import torch.distributed as dist

from hybridflow.resharding.transport import Transport, group_within
from tests.spmd import run_ranks

LONG = b"layout" * 50_000


def messages(rank: int) -> tuple[list[list[bytes]], bool, list]:
    assert dist.group.WORLD is not None
    transport = group_within(dist.group.WORLD, timeout_seconds=60.0, device="cpu")
    received = [
        transport.gather_messages(own) for own in (LONG if rank else b"another", b"", b"\x00\xff" * rank, bytes([rank]))
    ]
    return received, received[0][1] is received[0][2], transport.gather_plain({"rank": rank, "box": ((0, rank),)})


def test_every_rank_hears_all_and_what_is_alike_once():
    for received, is_one, plain in run_ranks(messages, 3):
        assert received[0] == [b"another", LONG, LONG] and is_one
        assert received[1:] == [[b"", b"", b""], [b"", b"\x00\xff", b"\x00\xff" * 2], [b"\x00", b"\x01", b"\x02"]]
        assert plain == [{"rank": rank, "box": [[0, rank]]} for rank in range(3)]


def test_a_rank_alone_hears_itself():
    alone = Transport.alone()
    assert alone.gather_messages(b"own") == [b"own"] and alone.gather_plain((1, None)) == [[1, None]]
