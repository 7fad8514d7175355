"""Memory that goes and comes back at the same addresses: on a CPU for real, on a GPU by the order of driver calls."""

import ctypes
import gc
import mmap
from pathlib import Path

import pytest
import torch

from mrl.engines.native.releasable_memory import ALIGNED, MemoryRange, _TorchPages, tensors_in_range
from mrl.models.kernels import cuda_memory
from mrl.models.kernels.cuda_memory import AddressRange

CPU = torch.device("cpu")
MIB = 1 << 20


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_memory_goes_while_tensors_are_held_and_comes_back_as_zeros_at_the_same_address():
    memory = MemoryRange(64 * MIB, CPU)
    assert memory.problem is None and memory.held_bytes == 0
    assert memory.take(64 * MIB) and not memory.take(MIB)
    whole = memory.tensor(0, (64 * MIB,), torch.uint8)
    part = memory.tensor(ALIGNED, (3, 5), torch.float32)
    address = part.data_ptr()
    whole.fill_(1)
    before = resident_bytes()
    memory.release()
    assert resident_bytes() < before - 60 * MIB, "somebody still holds the tensors"
    assert memory.take(64 * MIB)
    assert part.data_ptr() == address == memory.tensor(ALIGNED, (3, 5), torch.float32).data_ptr()
    assert not whole.any() and not part.any()


def test_a_tensor_is_only_where_memory_is_held():
    memory = MemoryRange(4096, CPU)
    with pytest.raises(ValueError, match="exceeds the 0 allocated bytes"):
        memory.tensor(0, (1,), torch.int64)
    memory.take(1024)
    assert memory.tensor(1016, (1,), torch.int64).numel() == 1
    with pytest.raises(ValueError, match="1032"):
        memory.tensor(1024, (1,), torch.int64)


def test_tensors_in_one_range_share_no_byte():
    wanted = [((3,), torch.uint8), ((2, 5), torch.bfloat16), ((0, 4), torch.float32), ((), torch.int64)]
    _, tensors = tensors_in_range(wanted, CPU)
    assert [(tuple(each.shape), each.dtype) for each in tensors] == wanted
    assert not any(each.data_ptr() % ALIGNED for each in tensors if each.numel())
    for number, each in enumerate(tensors):
        each.fill_(number + 1)
    assert [set(each.flatten().tolist()) for each in tensors] == [{1}, {2.0}, set(), {4}]
    assert tensors_in_range([], CPU)[0].take(0) is False


def test_where_addresses_may_change_tensors_follow_their_memory():
    pages = _TorchPages(CPU)
    pages.map(4096)
    part = pages.bytes[64:128].view(torch.float32)
    part.fill_(3.0)
    pages.unmap()
    assert pages.bytes.untyped_storage().size() == 0
    hole = torch.ones(4096, dtype=torch.uint8)
    pages.map(8192)
    assert not part.any() and part.data_ptr() == pages.bytes.data_ptr() + 64 and pages.bytes.numel() == 8192
    assert hole.all()


class Driver:
    """What libcuda does with addresses and memory, and what it forbids: memory twice, or in use when it is freed."""

    UNIT = 2 * MIB

    def __init__(self, room=1 << 40, fails=""):
        self.room, self.fails = room, fails
        self.reserved, self.pieces, self.mapped = {}, {}, {}
        self.readable = set()

    def __getattribute__(self, name):
        if name == object.__getattribute__(self, "fails"):
            return lambda *given: 1
        return object.__getattribute__(self, name)

    def cuMemGetAllocationGranularity(self, unit, properties, option):
        given = properties._obj
        assert (given.type, given.location.type, given.location.id, option) == (1, 1, 3, 1)
        unit._obj.value = self.UNIT
        return 0

    def cuMemAddressReserve(self, address, size, alignment, wanted, flags):
        address._obj.value = 0x7F0000000000 + sum(self.reserved.values())
        self.reserved[address._obj.value] = size.value
        return 0

    def cuMemCreate(self, handle, size, properties, flags):
        if sum(self.pieces.values()) + size.value > self.room:
            return cuda_memory.OUT_OF_MEMORY
        handle._obj.value = 17 + len(self.pieces)
        self.pieces[handle._obj.value] = size.value
        return 0

    def cuMemMap(self, address, size, offset, handle, flags):
        assert not self.mapped and self.pieces[handle.value] == size.value <= self.reserved[address.value]
        assert size.value % self.UNIT == 0
        self.mapped[address.value] = size.value
        return 0

    def cuMemSetAccess(self, address, size, access, count):
        assert self.mapped[address.value] == size.value and count.value == 1
        assert (access._obj.location.id, access._obj.flags) == (3, 3)
        self.readable.add(address.value)
        return 0

    def cuMemUnmap(self, address, size):
        assert self.mapped.pop(address.value) == size.value
        self.readable.discard(address.value)
        return 0

    def cuMemRelease(self, handle):
        del self.pieces[handle.value]
        return 0

    def cuMemAddressFree(self, address, size):
        assert not self.mapped and self.reserved.pop(address.value) == size.value
        return 0


def test_addresses_stay_while_the_drivers_memory_comes_and_goes():
    driver = Driver()
    addresses = AddressRange(5 * MIB, 3, driver)
    place = addresses.address
    assert addresses.num_bytes == 6 * MIB and driver.pieces == {}
    for size in (5 * MIB, 1, 6 * MIB):
        addresses.map(size)
        assert list(driver.readable) == [place] and sum(driver.pieces.values()) == -(-size // Driver.UNIT) * Driver.UNIT
        addresses.unmap()
        assert driver.pieces == driver.mapped == {} and list(driver.reserved) == [place] == [addresses.address]
    assert addresses.__cuda_array_interface__["data"] == (place, False)
    cuda_memory.reset_peak()
    addresses.map(1)
    addresses.unmap()
    assert cuda_memory.peak_bytes() == Driver.UNIT
    addresses.map(1)
    del addresses
    gc.collect()
    cuda_memory.reset_peak()
    assert cuda_memory.peak_bytes() == 0
    assert driver.pieces == driver.mapped == driver.reserved == {}


@pytest.mark.parametrize(
    ("driver", "error"),
    [
        (Driver(room=MIB), torch.OutOfMemoryError),
        (Driver(fails="cuMemMap"), RuntimeError),
        (Driver(fails="cuMemSetAccess"), RuntimeError),
    ],
)
def test_what_the_driver_refuses_leaves_nothing_behind(driver, error):
    addresses = AddressRange(MIB, 3, driver)
    with pytest.raises(error, match="CUDA error"):
        addresses.map(MIB)
    assert driver.pieces == driver.mapped == {}


def test_structures_have_the_sizes_of_cudas_header():
    """By a C compiler from cuda.h of CUDA 13.5."""
    kinds = (cuda_memory.Properties, cuda_memory.Access, cuda_memory.Location)
    assert [ctypes.sizeof(kind) for kind in kinds] == [32, 12, 8]
    fields = (cuda_memory.Properties.location, cuda_memory.Properties.win32, cuda_memory.Properties.flags)
    assert [field.offset for field in fields] == [8, 16, 24]


@pytest.mark.gpu
def test_a_gpu_gets_its_memory_back_though_tensors_are_held():
    """Nobody empties torch's cache here."""
    cuda = torch.device("cuda", torch.cuda.current_device())
    size = 512 * MIB
    memory = MemoryRange(size, cuda)
    assert memory.problem is None
    free = lambda: torch.cuda.mem_get_info(cuda)[0]  # noqa: E731
    before = free()
    memory.take(size)
    tensor = memory.tensor(256, (1000,), torch.bfloat16)
    address = tensor.data_ptr()
    tensor.fill_(2.0)
    assert before - free() >= size and float(tensor.sum()) == 2000.0
    memory.release()
    assert before - free() < 16 * MIB
    other = torch.ones(MIB, device=cuda)
    memory.take(size)
    assert tensor.data_ptr() == address and float(tensor.sum()) == 0.0 and bool(other.all())
