"""Processes for tests: they fork from one that has imported torch, which takes a fresh interpreter seconds."""

import multiprocessing

#: Each worker of the tests has one such server, with the modules that are named last: hence one list for all.
CONTEXT = multiprocessing.get_context("forkserver")
# installed modules only: a fork server does not know the folders of the tests
IMPORTED = ("pfml.experiments.store", "pfml.export", "pfml.models.convnet", "pfml.search", "pfml.training")
CONTEXT.set_forkserver_preload([*IMPORTED, "torch.distributed"])
