"""Faults of files: arrays, the kernel cache, tunings."""

from .mutation import Mutation

MUTATIONS = (
    Mutation(
        "a view does not keep the memory of what it was made of",
        "arrays/memory.py",
        "    buffer.owner = owner\n",
        "",
        "tests/conformance/caches/test_caches.py -k keeps_its_memory",
    ),
    Mutation(
        "a damaged object file is run",
        "cpu/runtime/compile.py",
        "if data[: _HEADER - 32] != _MAGIC + sum_of(path, code):",
        "if not data.startswith(_MAGIC):",
        "tests/robustness/test_cache.py -k damage",
    ),
    Mutation(
        "kernels are not named by every source",
        "cpu/runtime/kept_files.py",
        'entry.name != "__pycache__" and entry.is_dir()',
        'entry.name == "cpu" and entry.is_dir()',
        "tests/robustness/test_cache.py -k every_source",
    ),
    Mutation(
        "what a group may write is trusted",
        "cpu/runtime/kept_files.py",
        "not info.st_mode & 0o022",
        "not info.st_mode & 0o002",
        "tests/robustness/test_cache.py -k others_can_write",
    ),
    Mutation(
        "a header may promise more than the file holds",
        "arrays/files.py",
        "f.tell() + count * dtype.itemsize != size",
        "f.tell() + count * dtype.itemsize < size",
        "tests/tools/test_cli.py -k 'promises or damaged'",
    ),
    Mutation(
        "an interrupt leaves a file under its temporary name",
        "arrays/files.py",
        "            temporary.unlink(missing_ok=True)\n        if not isinstance(error, OSError):",
        "            if isinstance(error, OSError):\n                temporary.unlink(missing_ok=True)\n"
        "        if not isinstance(error, OSError):",
        "tests/robustness/test_files.py -k wherever_an_interrupt",
    ),
    Mutation(
        "a file of a cache is for everybody",
        "kv/saving.py",
        "write_arrays(path, stored, said, private=True)",
        "write_arrays(path, stored, said)",
        "tests/conformance/caches/test_caches_saved.py -k only_the_user",
    ),
    Mutation(
        "a file takes its name before the disk has it",
        "arrays/files.py",
        "            os.fsync(f.fileno())\n",
        "",
        "tests/conformance/caches/test_caches_saved.py -k on_the_disk",
    ),
    Mutation(
        "arrays of a file are copied before they are read",
        "arrays/files.py",
        "arrays[name] = x if x.flags.aligned else x.copy()",
        "arrays[name] = x.copy()",
        "tests/conformance/caches/test_caches_saved.py -k taken_twice",
    ),
    Mutation(
        "a tuning is believed whatever its sum says",
        "cpu/runtime/tuned.py",
        "if data[:_HEADER] != _MAGIC + sum_of(path, body):",
        "if data[: len(_MAGIC)] != _MAGIC:",
        "tests/tools/test_tuning.py -k damaged",
    ),
    Mutation(
        "what was tuned has no limits",
        "cpu/runtime/tuned.py",
        "or not all([low <= x <= high for x in each])",
        "or not each",
        "tests/tools/test_tuning.py -k planted",
    ),
    Mutation(
        "a candidate that is faster on the whole is taken",
        "tools/trials.py",
        "self.least >= _GAIN and self.worst >= _LOSS",
        "self.gain >= 1.0",
        "tests/tools/test_tuning.py -k noise",
    ),
)
