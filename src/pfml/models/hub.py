"""Models on the Hugging Face Hub, as they are in a folder: `hf-hub:organization/name`, or `...@revision`."""

from __future__ import annotations

from pathlib import Path

__all__ = ["HUB", "download_model", "is_on_hub", "upload_model"]

#: How the name of a model on the hub begins, as in timm.
HUB = "hf-hub:"
#: What is downloaded; anything else in a repository is none of ours.
FILES = ("model.json", "model-*.safetensors")


def is_on_hub(name: str | Path) -> bool:
    """Whether `name` is that of a model on the hub."""
    return str(name).startswith(HUB)


def download_model(name: str) -> Path:
    """The folder of a model on the hub, downloaded unless it is in the cache of huggingface_hub.

    Args:
        name: hf-hub:organization/name, or hf-hub:organization/name@revision.

    Raises:
        OSError: If it can be had neither from the hub nor from the cache.
    """
    from huggingface_hub import constants, snapshot_download

    repository, _, revision = name.removeprefix(HUB).partition("@")
    if repository.count("/") != 1:
        raise ValueError(f"a model on the hub must be {HUB}organization/name, got {name!r}")
    try:
        return Path(
            snapshot_download(
                repository,
                revision=revision or None,
                allow_patterns=list(FILES),
                local_files_only=constants.HF_HUB_OFFLINE,  # else huggingface_hub 1 asks for the files of a commit
            )
        )
    except Exception as error:  # of the network, of the hub, or of a name that it does not know
        raise OSError(
            f"{name} could not be downloaded ({type(error).__name__}: {str(error).splitlines()[0][:200]}): check the "
            f"name and the network; a private model needs HF_TOKEN"
        ) from error


def upload_model(
    folder: Path, repository: str, *, private: bool = False, token: str | None = None, message: str = ""
) -> str:
    """Make a repository of the hub of a saved model; what it is loaded by.

    Args:
        folder: Of the model.
        repository: organization/name; it is created unless it is there.
        private: Whether a new repository is private.
        token: Of the hub; None for HF_TOKEN, or what `hf auth login` has stored.
        message: Of the commit.
    """
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    api.create_repo(repository, private=private, exist_ok=True)
    api.upload_folder(
        repo_id=repository,
        folder_path=folder,
        commit_message=message or "an embedder of pfml",
        delete_patterns=list(FILES),  # of a model that was there before
    )
    return f"{HUB}{repository}"
