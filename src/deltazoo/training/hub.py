"""Ask the Hub once whether a name exists, before anything is loaded."""

from pathlib import Path
from typing import Literal


def check_on_hub(name: str, kind: Literal["model", "dataset"]) -> None:
    """Return if ``name`` is on the Hub or in this machine's cache of it.

    transformers and datasets ask the Hub for every file up to six times, so without this check a mistyped local path
    takes half a minute per file until it is refused.

    Raises:
        ValueError: no such name on the Hub, or the Hub cannot be reached and nothing of that name is cached.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    missing = f"there is no {'folder' if kind == 'model' else 'file or folder'} {name!r}"
    if _cached(name, kind):
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
        return  # an error of the Hub's server: loading will ask again
    except Exception as error:  # types of the HTTP library, which differ between versions of huggingface_hub
        raise ValueError(f"{missing}, and the Hub cannot be asked for it: {error}") from error


def _cached(name: str, kind: str) -> bool:
    from huggingface_hub import constants

    folders = [Path(constants.HF_HUB_CACHE) / f"{kind}s--{name.replace('/', '--')}"]
    if kind == "dataset":
        import datasets

        folders.append(Path(datasets.config.HF_DATASETS_CACHE) / name.replace("/", "___"))
    return any(folder.is_dir() for folder in folders)
