"""A local folder, in the layout of huggingface_hub's cache, as the Hugging Face Hub."""

import fnmatch
import shutil

import huggingface_hub
from huggingface_hub import constants


class LocalHub:
    """Takes uploads, and offers them by huggingface_hub's own cache, offline."""

    def __init__(self, cache):
        self.cache = cache

    @classmethod
    def installed(cls, cache, monkeypatch):
        """The hub that huggingface_hub talks to within the test."""
        local = cls(cache)
        monkeypatch.setattr(huggingface_hub, "HfApi", local)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        return local

    def __call__(self, token=None):
        self.token = token
        return self

    def create_repo(self, repository, *, private, exist_ok):
        assert exist_ok
        self.private = private

    def upload_folder(self, *, repo_id, folder_path, commit_message, delete_patterns):
        repository = self.cache / f"models--{repo_id.replace('/', '--')}"
        before = sorted(repository.glob("snapshots/*"))
        commit = f"{len(before) + 1:040x}"
        snapshot = repository / "snapshots" / commit
        if before:
            shutil.copytree(before[-1], snapshot)
            for file in list(snapshot.iterdir()):
                if any(fnmatch.fnmatch(file.name, pattern) for pattern in delete_patterns):
                    file.unlink()
        shutil.copytree(folder_path, snapshot, dirs_exist_ok=True)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / "main").write_text(commit)
        self.message, self.files = commit_message, sorted(path.name for path in snapshot.iterdir())
