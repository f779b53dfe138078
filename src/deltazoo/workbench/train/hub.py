"""Whether a name that is no local file or folder names something on the Hub, asked once before anything is loaded."""

from pathlib import Path
from typing import Literal


def check_on_hub(name: str, kind: Literal["model", "dataset"]) -> None:
    """Return if ``name`` is on the Hub or in its cache on this machine.

    Without this question a mistyped local path costs half a minute per file: transformers and datasets ask the Hub for
    one file after the other, up to six times each.

    Raises:
        ValueError: no such name on the Hub, or the Hub cannot be reached and nothing of that name is cached.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    missing = f"there is no {'folder' if kind == 'model' else 'file or folder'} {name!r}"
    if constants.HF_HUB_OFFLINE or _cached(name, kind):
        return
    try:
        HfApi().repo_info(name, repo_type=kind, timeout=10)
    except HFValidationError as error:
        raise ValueError(f"{missing}, and it is no name of a {kind} on the Hub (owner/name)") from error
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"{missing}, and the Hub has no {kind} of that name (or your token does not see it)"
        ) from error
    except HfHubHTTPError:
        return  # the Hub has trouble of its own: loading will ask again
    except Exception as error:  # the HTTP library's own types, which differ between versions of huggingface_hub
        raise ValueError(f"{missing}, and the Hub cannot be asked for it: {error}") from error


def _cached(name: str, kind: str) -> bool:
    from huggingface_hub import constants

    folders = [Path(constants.HF_HUB_CACHE) / f"{kind}s--{name.replace('/', '--')}"]
    if kind == "dataset":
        import datasets

        folders.append(Path(datasets.config.HF_DATASETS_CACHE) / name.replace("/", "___"))
    return any(folder.is_dir() for folder in folders)
