"""Processes for tests: none of them imports torch again, which takes a fresh interpreter seconds."""

import multiprocessing

#: Each worker of the tests has one such server, with the modules that are named last: hence one list for all.
CONTEXT = multiprocessing.get_context("forkserver")
# installed modules only: a fork server does not know the folders of the tests
IMPORTED = ("pfml.experiments.run", "pfml.export", "pfml.models.small_convnet", "pfml.search", "pfml.training")
# torch imports its compiler with the first optimizer, for more than a second
CONTEXT.set_forkserver_preload([*IMPORTED, "torch.distributed", "torch._dynamo"])


def as_launched(monkeypatch, rank, size):
    """Give this process the environment of one that torchrun has started."""
    launched = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)


def failures_of_several(count, target, *arguments):
    """What processes that do the same at once report; each calls target(*arguments, number, barrier, failures)."""
    context = multiprocessing.get_context("fork")
    together, failures = context.Barrier(count), context.SimpleQueue()
    workers = [context.Process(target=target, args=(*arguments, k, together, failures)) for k in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    found = [f"process {k} ended with {worker.exitcode}" for k, worker in enumerate(workers) if worker.exitcode]
    while not failures.empty():
        found.append(failures.get())
    return found
