"""How ranks become one engine: they are started or joined, and agree on what they are.

Before a weight is read all ranks hold the same model, code and settings, or none serves; the rank
with the least memory says how many latent blocks all of them have.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from nanok3.comm.exchange import Exchange, PeerLost, create_memory, map_memory
from nanok3.comm.host import JOIN_S, Host, Place, host_store, place_from
from nanok3.config import EngineConfig, ModelConfig, Shard
from nanok3.launch import Followers, spanning_lines, started_by
from nanok3.lockstep import Leader
from nanok3.plan import LATENTS, Plan, make_plan
from nanok3.spec.config import DraftConfig

LOAD_S = 3600.0  # between the first rank that has loaded its weights and the last
MEMORY_DIR = Path("/dev/shm")  # else where temporary files are
MEMORY_FILE = Path("/proc/meminfo")


@dataclass(frozen=True)
class Group:
    """This rank among its peers."""

    host: Host
    shard: Shard
    followers: Followers | None  # if this process has started them

    def exchange(self) -> Exchange:
        """Through memory that all ranks map; all have to be on one machine."""
        host, place = self.host, self.host.place
        path = ""
        if place.rank == 0:
            parent = MEMORY_DIR if MEMORY_DIR.is_dir() else None
            directory = tempfile.mkdtemp(prefix="nanok3-", dir=parent)
            path = str(Path(directory) / "exchange")
            create_memory(Path(path), place.size)
        path = host.gather("memory", path, JOIN_S)[0]
        try:
            memory: Tensor = map_memory(Path(path), place.size)
            host.gather("mapped", "", JOIN_S)
        finally:  # nothing is left, whatever ends the ranks
            if place.rank == 0:
                Path(path).unlink()
                Path(path).parent.rmdir()
        return Exchange(memory, place.rank, check_peers=host.check)

    def loaded(self) -> None:
        """When all ranks are ready to serve."""
        self.host.gather("loaded", "", LOAD_S)

    def end(self, leader: Leader) -> None:
        """The other ranks end with this one."""
        told = leader.end()
        if self.followers is not None:
            self.followers.close(told)

    def fail(self, error: BaseException) -> None:
        """This rank does not go on; nor do those that it has started."""
        if not isinstance(error, PeerLost):
            self.host.fail(str(error) or type(error).__name__)
        if self.followers is not None:
            self.followers.close(told=False)


def join(model_dir: Path, settings: EngineConfig, draft_dir: Path | None = None) -> Group:
    """All ranks have been started. Raises ValueError or PeerLost with the reason why not."""
    gpus, place = settings.gpus, place_from(os.environ)
    if place is not None and place.size > 1:
        if place.size != gpus:
            by = started_by(os.environ)
            raise ValueError(f"{by} has started {place.size} ranks, but --gpus is {gpus}")
        _share_threads(settings, place)
        return Group(Host(place), Shard(place.rank, gpus), None)
    store = host_store()
    arguments = [str(os.getpid()), str(model_dir), json.dumps(asdict(settings))]
    arguments += [] if draft_dir is None else [str(draft_dir)]
    followers = Followers(gpus, store.port, arguments)
    try:
        place = Place(
            0, gpus, 0, gpus, "127.0.0.1", store.port, hosts_store=True, prefix="nanok3/0"
        )
        _share_threads(settings, place)
        host = Host(place, store=store, check_peers=followers.check)
    except BaseException:
        followers.close(told=False)
        raise
    return Group(host, Shard(0, gpus), followers)


def is_joining() -> bool:
    """Whether torchrun or srun has started this process as one of several."""
    place = place_from(os.environ)
    return place is not None and place.size > 1


def too_many(device: str, gpus: int, command: Sequence[str]) -> str | None:
    """What to do for more GPUs than this node has; a CPU can be any number of ranks."""
    if device == "cpu" or gpus == 1 or is_joining():
        return None
    here = torch.cuda.device_count()
    return None if gpus <= here else spanning_lines(gpus, here, command)


def agree(
    group: Group,
    model_dir: Path,
    config: ModelConfig,
    settings: EngineConfig,
    draft: DraftConfig | None = None,
) -> EngineConfig:
    """The settings that all ranks serve with."""
    plan = make_plan(config, group.shard, settings, draft)
    mine = {
        "model": hash_of(repr(config).encode(), *_small_files(model_dir)),
        "draft": hash_of(repr(draft).encode()),
        "code": code_hash(),
        "settings": hash_of(repr(settings).encode()),
        "num_blocks": blocks_that_fit(plan, free_bytes(group.host.place)),
    }
    ranks = [json.loads(text) for text in group.host.gather("plan", json.dumps(mine), JOIN_S)]
    wrong = [
        f"rank {rank} has another {what} than rank 0"
        for rank, theirs in enumerate(ranks)
        for what in ("model", "draft", "code", "settings")
        if theirs[what] != ranks[0][what]
    ]
    if wrong:
        raise ValueError("; ".join(wrong) + "; start all ranks from the same files and options")
    smallest = min(theirs["num_blocks"] for theirs in ranks)
    if smallest < 1:
        rank = next(r for r, theirs in enumerate(ranks) if theirs["num_blocks"] < 1)
        raise ValueError(f"rank {rank} has no memory for this model; lower --requests or --context")
    return replace(settings, num_blocks=smallest)


def blocks_that_fit(plan: Plan, free: int | None) -> int:
    """Latent blocks of a plan, as many of them as there is room for."""
    if free is None or plan.total_bytes <= free:
        return plan.num_blocks
    a_block = plan.nbytes[LATENTS] // (plan.num_blocks + 1)  # trash
    room = free - (plan.total_bytes - plan.nbytes[LATENTS])
    return max(room // a_block - 1, 0) if a_block else 0


def free_bytes(place: Place) -> int | None:
    """Of memory that this rank may use, where the system tells."""
    if not MEMORY_FILE.exists():
        return None
    lines = dict(line.split(":", 1) for line in MEMORY_FILE.read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024 // place.local_size


def code_hash() -> str:
    """Of everything that decides bits here."""
    root = Path(__file__).parent
    sources = [path.read_bytes() for path in sorted(root.rglob("*.py"))]
    return hash_of(torch.__version__.encode(), *sources)


def hash_of(*parts: bytes) -> str:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(hashlib.sha256(part).digest())
    return whole.hexdigest()


def _small_files(model_dir: Path) -> list[bytes]:
    """Which tensor lies where, and how text becomes ids."""
    names = ("model.safetensors.index.json", "generation_config.json", "tiktoken.model")
    return [(model_dir / n).read_bytes() for n in names if (model_dir / n).is_file()]


def _share_threads(settings: EngineConfig, place: Place) -> None:
    """A CPU's ranks divide its cores."""
    if settings.device == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // place.local_size))
