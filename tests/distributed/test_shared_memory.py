"""Memory that ranks of a host share: found by those who may, gone with its owner, and tensors put into it."""

import errno
import gc
import os
from dataclasses import replace

import torch

from mrl.distributed import shared_memory


def refuses(descriptor, offset, size):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_two_who_share_a_buffer_see_the_same_bytes_and_nobody_finds_it_afterwards():
    buffer, offer = shared_memory.create_buffer(5000)
    other = shared_memory.attach(offer)
    offer.close()
    assert shared_memory.attach(offer) is None
    buffer[4321] = 7
    assert other[4321] == 7


def test_a_buffer_that_is_not_shared_is_not_found(monkeypatch):
    assert shared_memory.attach(shared_memory.create_buffer(100, share=False)[1]) is None
    monkeypatch.setattr(os, "posix_fallocate", refuses)
    buffer, offer = shared_memory.create_buffer(100)
    assert buffer.numel() == 100
    assert shared_memory.attach(offer) is None


def test_another_file_of_the_same_number_is_not_taken_for_a_buffer(tmp_path):
    _, offer = shared_memory.create_buffer(100)
    with (tmp_path / "x").open("wb+") as file:
        file.write(bytes(100))
        assert shared_memory.attach(replace(offer, file=file.fileno())) is None
    assert shared_memory.attach(replace(offer, process=1 << 22)) is None
    assert shared_memory.attach(replace(offer, size=1 << 40)) is None, "larger than it is"
    assert shared_memory.attach(offer) is not None
    offer.close()


def tensors_with_views():
    base = torch.arange(100.0)
    tensors = [torch.nn.Parameter(torch.ones(5, 3)), base, base[3:60].view(3, 19), base[10:40:2]]
    tensors.append(torch.nn.Parameter(torch.zeros(1)))
    tensors[-1].data = base[60:80].view(4, 5)
    return tensors


def test_tensors_keep_their_values_and_what_they_have_in_common():
    tensors = tensors_with_views()
    before = [tensor.detach().clone() for tensor in tensors]
    strides = [tensor.stride() for tensor in tensors]
    assert shared_memory.shared_location(tensors[0]) is None
    assert shared_memory.share(tensors)
    assert all(torch.equal(*pair) for pair in zip(tensors, before, strict=True))
    assert [tensor.stride() for tensor in tensors] == strides
    _, base, rows, every_second, parameter = tensors
    base[60], base[12] = -1, -2
    assert (float(parameter.detach()[0, 0]), float(rows[0, 9]), float(every_second[1])) == (-1, -2, -2)


def test_others_find_them_by_their_place_until_the_last_is_gone():
    tensors = tensors_with_views()
    shared_memory.share(tensors)
    offer, first = shared_memory.shared_location(tensors[2])
    other = shared_memory.attach(offer)
    tensors[2][1, 1] = 7.5
    at = first + 4 * (19 + 1)
    assert float(other[at : at + 4].view(torch.float32)) == 7.5
    del tensors
    gc.collect()
    assert shared_memory.attach(offer) is None


def test_without_room_tensors_stay(monkeypatch):
    monkeypatch.setattr(os, "posix_fallocate", refuses)
    tensors = tensors_with_views()
    addresses = [tensor.data_ptr() for tensor in tensors]
    assert not shared_memory.share(tensors)
    assert [tensor.data_ptr() for tensor in tensors] == addresses
