"""`bundle.json`: what a bundle holds, read strictly and written last. Specified in docs/bundle.md."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from skipdecode.errors import BundleError, SkipDecodeError
from skipdecode.model import Model, check_sources, has_valid_sizes, has_valid_sources, has_valid_states
from skipdecode.schedule import Schedule, active_layers
from skipdecode.strict_json import MalformedError, decode

FORMAT_VERSION = 4
MANIFEST = "bundle.json"
GRAPHS = "graphs"  # ONNX Runtime reads weights only from the graph's own folder, so graphs and weights share one
WEIGHTS = ("fp32", "fp16", "bf16", "int8", "int4")  # types of a target's weights; the last two quantised, in blocks or by output
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}  # per dtype of the source weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The largest run that the bundle was exported for."""

    max_length: int  # tokens per row, prompt and generated
    max_batch: int  # rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One distinct set of active layers."""

    name: str  # v24
    num_layers: int
    segments: tuple[int, ...]  # indices into `Manifest.segments`, in the order they run
    graph: str | None  # whole graph, weights by reference; None in a slim bundle


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Engines that are ready to load on one kind of device."""

    name: str  # cpu, cuda, tensorrt-rtx, tensorrt
    weights: str  # type of its engines' weights, one of WEIGHTS
    library: str  # onnxruntime, tensorrt_rtx, tensorrt
    library_version: str  # prepacked weights and plans work with this version only
    machine: str  # cpu: its architecture, x86_64; plans: the GPUs, "sm86 sm89" or "sm80 and later"; cuda: "any"
    cpu_features: tuple[str, ...]  # instruction sets that the prepacked weights were laid out for
    embed: str
    segments: tuple[str, ...]  # one engine per segment
    head: str
    tied_weight: str | None  # file of the weight [V',E] that embedding and head share (`bindings`); None: each has its own
    segment_weight_bytes: tuple[int, ...]  # per segment, the bytes of weights that a decode step of one row reads
    head_weight_bytes: int

    @property
    def fixed_kv_buffer(self) -> bool:
        """Whether engines are compiled for one number of slots: TensorRT updates a KV buffer in place only then."""
        return self.library != "onnxruntime"

    @property
    def float_bytes(self) -> int:
        """Bytes of a number in hidden states, keys and values: fp32 on cpu, fp16 or bf16 on GPUs."""
        return 4 if self.name == "cpu" else 2


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """One file of the bundle."""

    path: str  # relative, inside the bundle
    size: int  # bytes
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything `bundle.json` says.

    Raises:
        MalformedError, ScheduleError: parts are out of range or contradict each other.
    """

    format_version: int
    model: Model
    dtype: str  # of the source weights, a key of ITEM_BYTES
    limits: Limits
    schedule: Schedule
    kv_slots: tuple[int | None, ...]  # per layer, how many of the schedule's positions need a slot (`Schedule.cap`); None: all
    segments: tuple[tuple[int, ...], ...]  # the layers of each
    variants: tuple[Variant, ...]
    targets: tuple[Target, ...]
    files: tuple[File, ...]

    def __post_init__(self) -> None:
        depth = self.model.num_layers
        layers = [layer for segment in self.segments for layer in segment]
        # lengths are compared first: a depth of 10**9 is refused before anything of that size is allocated
        covered = len(layers) == depth and layers == list(range(depth)) and all(self.segments)
        caps = tuple(map(self.schedule.cap, range(depth))) if len(self.kv_slots) == depth else None
        checks = (
            (self.format_version == FORMAT_VERSION, "format_version", f"is not {FORMAT_VERSION}"),
            (self.dtype in ITEM_BYTES, "dtype", f"is none of {', '.join(ITEM_BYTES)}"),
            (self.schedule.num_layers == depth, "schedule.num_layers", f"differs from the model's {depth} layers"),
            (covered, "segments", "do not cover each layer once"),
            (self.kv_slots == caps, "kv_slots", "do not follow from the schedule"),
            ({*self.schedule.variants, depth} <= {v.num_layers for v in self.variants}, "variants", "lack one of the schedule's"),
            (len({v.num_layers for v in self.variants}) == len(self.variants), "variants", "are not distinct"),
            (all(t.weights in WEIGHTS for t in self.targets), "targets", f"have weights that are none of {', '.join(WEIGHTS)}"),
            (all(len(t.segments) == len(self.segments) for t in self.targets), "targets", "lack an engine for a segment"),
            (all(map(_has_valid_weight_bytes, self.targets)), "targets", "do not say how many bytes of weights each engine has"),
            (has_valid_sizes(self.model), "model", "has sizes that are not positive numbers below 2**63"),
            (has_valid_states(self.model), "model.state_layers", "have layers out of range or twice, or parts without a size"),
            (has_valid_sources(self.model), "model.state_layers", "read keys of layers that have none, or are above"),
            (_are_valid_limits(self.limits), "limits", "are not positive numbers below 2**63"),
        )  # fmt: skip
        for holds, where, what in checks:
            if not holds:
                raise MalformedError(f"{where} {what}")
        check_sources(self.model.key_sources, self.schedule)
        for variant in self.variants:
            self._check_variant(variant)
        known = {file.path for file in self.files}
        if len(known) < len(self.files):
            raise MalformedError("files: one is listed twice")
        used = [path for t in self.targets for path in (t.embed, *t.segments, t.head, t.tied_weight) if path is not None]
        used += [v.graph for v in self.variants if v.graph is not None]
        for path in [*known, *used]:
            pure = PurePosixPath(path)
            if pure.is_absolute() or ".." in pure.parts or "\\" in path or path not in known:
                raise MalformedError(f"{path!r} is outside the bundle or not among its files")

    def _check_variant(self, variant: Variant) -> None:
        fits = 1 <= variant.num_layers <= self.model.num_layers
        if fits and all(0 <= index < len(self.segments) for index in variant.segments):
            layers = tuple(layer for index in variant.segments for layer in self.segments[index])
            warmup = self.schedule.warmup_layers
            if layers == active_layers(self.model.num_layers, warmup, variant.num_layers):
                return
        raise MalformedError(f"variants: {variant.name} does not climb its layers")

    @property
    def default_target(self) -> str:
        """The target that runs unless another is named: cpu, or the first one if the bundle has no cpu."""
        names = [target.name for target in self.targets]
        return "cpu" if "cpu" in names or not names else names[0]


def read(bundle: Path) -> Manifest:
    """Read and check `bundle/bundle.json`, and check that every file exists and has its size.

    Raises:
        BundleError: `bundle.json` is missing, not JSON, of another format version or malformed, or a file is missing,
            unreadable or of another size.
    """
    path = bundle / MANIFEST
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise BundleError("there is no bundle.json here", "name the folder that skip-export wrote", where=str(bundle)) from error
    except OSError as error:
        raise _unreadable_error(path, error) from error
    except (ValueError, RecursionError) as error:
        raise BundleError(f"cannot be read ({error})", "export the model again", where=str(path)) from error
    version = data.get("format_version") if isinstance(data, dict) else None
    if version != FORMAT_VERSION:
        raise BundleError(
            f"format_version is {reprlib.repr(version)}, this runtime reads {FORMAT_VERSION}",
            "export the model with this version",
            where=str(path),
        )
    try:
        manifest: Manifest = decode(Manifest, data)
    except (MalformedError, SkipDecodeError) as error:
        raise BundleError(str(error), "export the model again", where=str(path)) from error
    for file in manifest.files:
        _check_size(bundle, file)
    return manifest


@contextmanager
def one_bundle(bundle: Path) -> Iterator[None]:
    """Ensure that everything read inside this block comes from one bundle, even if the folder is replaced meanwhile.

    Bundles are told apart by their `bundle.json`. Only `check_hashes` detects other files that were replaced one by one.

    Raises:
        BundleError: the bundle was replaced, by an export with --force or a deployment that renames a folder or switches a link.
    """
    before = _identity(bundle)
    try:
        yield
    except Exception as error:
        if _identity(bundle) != before:
            raise _replaced_error(bundle) from error
        raise
    if _identity(bundle) != before:
        raise _replaced_error(bundle)


def file_identity(path: Path) -> tuple[int, ...]:
    """What distinguishes a file from another one put under the same name: device, inode, size and modification time in ns.

    Raises:
        OSError: there is no such file.
    """
    stat = path.stat()
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def _identity(bundle: Path) -> tuple[int, ...] | None:
    """The identity of the bundle's manifest; None if there is none."""
    try:
        return file_identity(bundle / MANIFEST)
    except (OSError, ValueError):  # ValueError: a NUL or a lone surrogate in the name
        return None


def _replaced_error(bundle: Path) -> BundleError:
    return BundleError("was replaced while it was loaded", "load it again", where=str(bundle))


def write(manifest: Manifest, bundle: Path) -> None:
    """Write `bundle.json`, the last file of a bundle."""
    text = json.dumps(dataclasses.asdict(manifest), indent=1, default=str)
    (bundle / MANIFEST).write_text(text + "\n", encoding="utf-8")


def describe_file(bundle: Path, path: str) -> File:
    """Size and SHA-256 of a file of the bundle."""
    with (bundle / path).open("rb") as data:
        digest = hashlib.file_digest(data, "sha256").hexdigest()
    return File(path=path, size=(bundle / path).stat().st_size, sha256=digest)


def check_hashes(manifest: Manifest, bundle: Path) -> None:
    """Compare every file's SHA-256 with the manifest's (reads the whole bundle).

    Raises:
        BundleError: a file has changed or cannot be read.
    """
    for file in manifest.files:
        try:
            current = describe_file(bundle, file.path)
        except OSError as error:
            raise _unreadable_error(bundle / file.path, error) from error
        if current.sha256 != file.sha256:
            raise BundleError(
                "its contents are not what the manifest says", "export the model again", where=str(bundle / file.path)
            )


def _check_size(bundle: Path, file: File) -> None:
    path = bundle / file.path
    try:
        size = path.stat().st_size if path.is_file() else None
        if size is not None and not os.access(path, os.R_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:  # a name too long, a folder that may not be entered
        raise _unreadable_error(path, error) from error
    if size is None:
        raise BundleError("is missing", "export the model again", where=str(path))
    if size != file.size:
        raise BundleError(f"has {size} bytes, not {file.size}", "export the model again", where=str(path))


def _unreadable_error(path: Path, error: OSError) -> BundleError:
    return BundleError(f"cannot be read ({error.strerror})", "check its name and permissions", where=str(path))


def _has_valid_weight_bytes(target: Target) -> bool:
    sizes = (*target.segment_weight_bytes, target.head_weight_bytes)
    return len(sizes) == len(target.segments) + 1 and all(0 < size < 2**63 for size in sizes)


def _are_valid_limits(limits: Limits) -> bool:
    return all(0 < number < 2**63 for number in dataclasses.astuple(limits))
