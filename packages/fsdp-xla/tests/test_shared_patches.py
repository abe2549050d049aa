"""Lightning's patches of loaders' classes, put on by ranks that are threads: on while any of them needs them."""

from __future__ import annotations

import threading

from lightning.fabric.utilities.data import _replace_dunder_methods
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from fsdp_xla.cpu_ranks.lockstep import _SharedPatches


def test_the_last_thread_takes_them_off() -> None:
    before = BatchSampler.__init__, DataLoader.__init__
    patches = _SharedPatches(_replace_dunder_methods)
    both_in, first_out = threading.Barrier(2), threading.Event()
    made: list[BatchSampler] = []

    def first() -> None:
        with patches.patched(DataLoader, "dataset"), patches.patched(BatchSampler):
            both_in.wait(10)
        first_out.set()

    def second() -> None:
        with patches.patched(DataLoader, "dataset"), patches.patched(BatchSampler):
            both_in.wait(10)
            assert first_out.wait(10)
            made.append(BatchSampler(SequentialSampler(range(4)), 2, drop_last=False))

    threads = [threading.Thread(target=each) for each in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert vars(made[0])["__pl_saved_arg_names"] == ("sampler", "batch_size")  # as Lightning notes it
    assert (BatchSampler.__init__, DataLoader.__init__) == before
    assert not any(name.startswith("__old") for made_of in (BatchSampler, DataLoader) for name in vars(made_of))
