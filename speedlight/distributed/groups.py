"""The processes of a group: what they tell each other before a call, messages between two, and who is missed."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..errors import ArgumentError, ArgumentTypeError, CommunicationError, Error, FileError, pass_on, shown

_SIZES = 2  # what agreed() compares first holds so many
_PATIENCE = 3.0  # seconds for the store, whose answer makes a message better
_TAG_BITS = 15, 8, 8  # of a message in its exchange, of that in its call, of the call: 31 in all


class _Known:
    """The state of a group between calls."""

    def __init__(self) -> None:
        self.calls = 0
        self.exchanges = 0  # since the last call began: its own, and those of passes back
        self.failed: str | None = None  # a call that did not end leaves messages behind
        self.opened: set[str] = set()  # kinds of devices between which something went


_groups: weakref.WeakKeyDictionary[Any, _Known] = weakref.WeakKeyDictionary()


class Message(NamedTuple):
    """A tensor on its way, and who is at the other end (its rank in the group)."""

    work: Any
    tensor: torch.Tensor
    peer: int
    what: str  # as an error names it


class Peers:
    """A group as one call sees it."""

    def __init__(self, group: Any) -> None:
        self.group = group_of(group)
        self.device = _device_of(self.group)
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.known = _groups.setdefault(self.group, _Known())

    def world_rank(self, rank: int) -> int:
        return dist.get_global_rank(self.group, rank)

    # --- before anything is sent

    def begin(self) -> None:
        """Counts a call, where others find it if this process is missed."""
        known = self.known
        self._check()
        known.calls, known.exchanges = known.calls + 1, 0
        if self.ranks > 1:
            with contextlib.suppress(Exception):  # of use to messages alone
                self._store().set(f"speedlight/{self.rank}", str(known.calls))

    def exchange(self, words: Sequence[int]) -> list[tuple[int, ...]]:
        """Some int64 of every process, in the order of ranks."""
        if self.ranks == 1:
            return [tuple(words)]
        mine = torch.tensor(words, dtype=torch.int64, device=self.device)
        return [tuple(x.tolist()) for x in self.gathered(mine, "to compare calls")]

    def gathered(self, mine: torch.Tensor, what: str) -> list[torch.Tensor]:
        """A tensor of every process, all of one shape and dtype, in the order of ranks: sent from one to one, so that
        who is missed is known.
        """
        found = [mine if rank == self.rank else torch.empty_like(mine) for rank in range(self.ranks)]
        others = [rank for rank in range(self.ranks) if rank != self.rank]
        self.carry([(mine, rank, 0, what) for rank in others], [(found[rank], rank, 0, what) for rank in others])
        return found

    def check_carries(self, name: str, device: torch.device) -> None:
        """Raises unless the group has a backend that sends tensors of a device."""
        if self.ranks == 1 or (device.type == "cpu" and device in self.group._device_types):
            return
        carries = [x.type for x in self.group._device_types if self.group._get_backend(x).name() != "gloo"]
        if device.type not in carries:
            asked, kind = ("cpu:gloo,cuda:nccl", "NCCL") if device.type == "cuda" else ("gloo", "gloo")
            raise ArgumentError(
                f"group: expected a backend that sends {name}, on {device}, from one process to another, as {kind} "
                f"does; got {dist.get_backend_config(self.group)}. torch.distributed.init_process_group({asked!r}) has "
                "one."
            )
        if device.type == "cuda" and device.index not in (None, torch.cuda.current_device()):
            raise ArgumentError(
                f"{name}: expected a tensor on cuda:{torch.cuda.current_device()}, this process's current GPU, from "
                f"which the group sends; got one on {device}. Call torch.cuda.set_device({device.index}) before."
            )

    def open(self, device: torch.device) -> None:
        """The first messages between devices are of all processes, as NCCL wants them."""
        if self.ranks > 1 and device.type not in (self.device.type, *self.known.opened):
            self.gathered(torch.zeros(1, dtype=torch.int64, device=device), "to begin")
            self.known.opened.add(device.type)

    def all_gather_object(self, said: Any) -> list[Any]:
        """Something of every process, in the order of ranks."""
        found: list[Any] = [None] * self.ranks
        with self.underway():
            try:
                dist.all_gather_object(found, said, group=self.group)
            except RuntimeError as error:
                pass_on(error)
                raise self.missed("to say how their calls differ", None, error) from error
        return found

    # --- messages

    def post(self, sends: list[tuple[torch.Tensor, int, int, str]], receives: list[Any]) -> list[Message]:
        """Begins messages, (tensor, peer, tag, what): those that are sent, then those that come."""
        given = [(dist.isend, x) for x in sends] + [(dist.irecv, x) for x in receives]
        given = [(how, x) for how, x in given if x[0].numel()]
        if not given:
            return []
        with self.underway():
            ops = [dist.P2POp(how, x[0], group=self.group, tag=self._tag(x[2]), group_peer=x[1]) for how, x in given]
            try:
                works = dist.batch_isend_irecv(ops)
            except RuntimeError as error:
                pass_on(error)
                raise self.missed(given[0][1][3], given[0][1][1], error) from error
        if len(works) < len(given):  # one for all of them, where they are grouped
            works = [works[0]] * len(given)
        return [Message(work, x[0], x[1], x[3]) for work, (_, x) in zip(works, given, strict=True)]

    def carry(self, sends: list[tuple[torch.Tensor, int, int, str]], receives: list[Any]) -> None:
        """Messages that nothing is computed beside, until they have come and gone."""
        with self.together():
            for message in self.post(sends, receives):
                self.wait(message)

    def wait(self, message: Message) -> None:
        """Until it has come, or gone."""
        with self.underway():
            try:
                message.work.wait()
            except RuntimeError as error:
                pass_on(error)
                raise self.missed(message.what, message.peer, error) from error

    def _tag(self, tag: int) -> int:
        """A message's, of this exchange alone: of another one, from a process that was interrupted and goes on, gloo
        would write what is shorter into a buffer, and end the process where it is longer.
        """
        found = 0
        for n, bits in zip((self.known.calls, self.known.exchanges, tag), reversed(_TAG_BITS), strict=True):
            found = found << bits | n % (1 << bits)
        return found

    # --- failures

    def _check(self) -> None:
        if self.known.failed is not None:
            raise CommunicationError(
                f"group: expected a group whose calls have all ended; one failed ({self.known.failed}). End these "
                "processes, or make a new group (torch.distributed.new_group)."
            )

    @contextlib.contextmanager
    def together(self) -> Any:
        """Exchanges what all processes exchange together."""
        self._check()
        self.known.exchanges += 1
        with self.underway():
            yield

    @contextlib.contextmanager
    def underway(self, *alike: type[Exception]) -> Any:
        """After an error, or an interrupt, the group has messages that nobody will take; not after those errors that
        all processes raise alike.
        """
        try:
            yield
        except alike:
            raise
        except BaseException as error:
            said = str(error) if isinstance(error, Error) else type(error).__name__
            self.known.failed = self.known.failed or said
            raise

    def missed(self, what: str, peer: int | None, error: Exception) -> CommunicationError:
        """The error that names who did not answer. Who finds out first tells the others, who may miss another one."""
        ranks = self._answered(self._absent, []) if peer is None else [peer]
        names = ", ".join([f"rank {self.world_rank(x)}" for x in ranks]) or "a process"
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        said = f"{names} did not answer {what} (call {self.known.calls} of rank {self.world_rank(self.rank)})"
        mine = f"{self.world_rank(ranks[0]) if ranks else -1} {said}"
        first = self._answered(lambda: self._first(mine), mine)
        rank, _, earlier = first.partition(" ")
        more = "" if earlier == said else f" Before that, {earlier}."
        return CommunicationError(
            f"group: expected every process to take part; {said} within {self._timeout()}: it has ended, is "
            f"stopped, or makes another call.{more} PyTorch says: {reason}",
            int(rank) if int(rank) >= 0 else None,
        )

    def _answered(self, question: Callable[[], Any], otherwise: Any) -> Any:
        """Returns the store's answer, in time: its keeper may be the process that is stopped, and then it never
        answers.
        """
        found: list[Any] = []
        asking = threading.Thread(target=lambda: found.append(question()), daemon=True)
        asking.start()
        asking.join(_PATIENCE)
        return found[0] if found else otherwise

    def _absent(self) -> list[int]:
        """Who has not begun this call, as far as the store knows."""
        found = []
        for rank in range(self.ranks):
            with contextlib.suppress(Exception):
                key = f"speedlight/{rank}"
                store = self._store()
                if not store.check([key]) or int(store.get(key)) < self.known.calls:
                    found.append(rank)
        return found

    def _first(self, said: str) -> str:
        """Returns the first form of this call."""
        try:
            key = f"speedlight/failed/{self.known.calls}"
            return self._store().compare_set(key, "", said).decode() or said
        except Exception:  # who keeps the store may be the one that ended
            return said

    def _store(self) -> Any:
        return distributed_c10d._get_process_group_store(self.group)

    def _timeout(self) -> str:
        try:
            backend = self.group._get_backend(self.device)
            return f"{backend.options._timeout.total_seconds():g} s"
        except Exception:  # a backend without such options
            return "the group's timeout"


class SingleRank(NamedTuple):
    """A group of one process."""

    rank: int = 0
    ranks: int = 1

    def post(self, sends: list[Any], receives: list[Any]) -> list[Message]:
        return []

    def together(self) -> Any:
        return contextlib.nullcontext()

    def underway(self, *alike: type[Exception]) -> Any:
        return contextlib.nullcontext()

    def check_carries(self, name: str, device: torch.device) -> None:
        return

    def open(self, device: torch.device) -> None:
        return


class MeshGroups(NamedTuple):
    """Along which keys travel, and along which heads are exchanged."""

    ring: Any
    heads: Any

    @property
    def ranks(self) -> int:
        return self.ring.ranks * self.heads.ranks

    @property
    def rank(self) -> int:
        """Row by row."""
        return self.ring.rank * self.heads.ranks + self.heads.rank

    @contextlib.contextmanager
    def underway(self, *alike: type[Exception]) -> Any:
        """In both groups, as theirs."""
        with self.ring.underway(*alike), self.heads.underway(*alike):
            yield


def peers_of(group: Any, mesh: Any) -> MeshGroups:
    """The processes of a group, or of a mesh."""
    if mesh is None:
        return MeshGroups(Peers(group), SingleRank())
    if group is not None:
        raise ArgumentError("group: expected None beside mesh=, which has its groups; got both.")
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(mesh, DeviceMesh) or mesh.ndim not in (1, 2):
        raise ArgumentTypeError(f"mesh: expected a DeviceMesh of one or two dimensions; got {shown(mesh)}.")
    groups = [Peers(mesh.get_group(d)) for d in range(mesh.ndim)]
    return MeshGroups(groups[0], groups[1] if mesh.ndim == 2 else SingleRank())


def group_of(group: Any) -> Any:
    """A process group; None is the whole world."""
    if not dist.is_available() or not dist.is_initialized():
        raise ArgumentError(
            "group: expected torch.distributed to be initialised; it is not. Start the processes by torchrun, and call "
            "torch.distributed.init_process_group('gloo') in each; 'cpu:gloo,cuda:nccl' on GPUs."
        )
    found = dist.group.WORLD if group is None else group
    if not isinstance(found, dist.ProcessGroup):
        raise ArgumentTypeError(
            f"group: expected a process group of torch.distributed, or None for all processes; got "
            f"{type(group).__name__}. A DeviceMesh is mesh=."
        )
    if dist.get_rank(found) < 0:
        raise ArgumentError("group: expected a group that this process belongs to; got another one.")
    return found


def _device_of(group: Any) -> torch.device:
    """Returns the device of messages that a group's processes exchange, whatever their tensors are."""
    kinds = group._device_types
    if not kinds or torch.device("cpu") in kinds:
        return torch.device("cpu")
    return group.bound_device_id or kinds[0]


def agreed(peers: Peers, form: dict[str, str], sizes: Sequence[int], error: Exception | None) -> list[tuple[int, ...]]:
    """The sizes of every process, once all have said the same of their calls; nothing was sent before.

    form: what has to be the same, by name; its "call", which says how many sizes there are, comes first.
    error: what is wrong with this process's arguments, which is then raised; the others are told.
    """
    peers.begin()
    digest, first = _digest(form), (*sizes, 0, 0)[:_SIZES]  # as many words of every call, whichever others make
    found = peers.exchange((digest, 0 if error else 1, *first))
    if not [x for x in found if x[0] != digest or x[1] != 1]:
        if len(sizes) > _SIZES:
            return peers.exchange(sizes)
        return [x[2 : 2 + len(sizes)] for x in found]
    said = peers.all_gather_object((None if error is None else _text(error), isinstance(error, FileError), form))
    if error is not None:
        raise error
    for rank, (wrong, of_file, _) in enumerate(said):
        if wrong is not None:
            kind = FileError if of_file else ArgumentError
            raise kind(f"group: rank {peers.world_rank(rank)} failed before the exchange: {wrong}")
    mine = said[peers.rank][2]
    for rank, (*_, theirs) in enumerate(said):
        for name in {**mine, **theirs}:
            if mine.get(name) != theirs.get(name):
                raise ArgumentError(
                    f"{name}: expected the same in every process; got {mine.get(name)} on rank "
                    f"{peers.world_rank(peers.rank)} and {theirs.get(name)} on rank {peers.world_rank(rank)}."
                )
    raise AssertionError("equal forms have equal digests")


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, Error) else f"{type(error).__name__}: {error}"


def _digest(form: dict[str, str]) -> int:
    text = "\0".join([f"{name}={x}" for name, x in form.items()])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
