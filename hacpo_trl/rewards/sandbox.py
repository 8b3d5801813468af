"""Launcher of the code reward's sandbox: takes rights away, then runs one role of code_runner.py under a time limit.

Run by path in a fresh, isolated interpreter: `python -I sandbox.py CONFIG_FD CONTROL_FD`. Three processes:

    launcher       keeps the caller's rights, waits, ends everything when the time is over or the caller is gone
      init         first process of a PID namespace: when it ends, the kernel ends every process in it
        role       the code to run, as a user without rights

With namespaces (root, or a kernel that grants unprivileged user namespaces): no network device, nothing but the
temporary directory (in memory, of limited size) is writable, no other process is visible. Without them, the seccomp
filter also refuses every call that would write to a file or touch another process, and the launcher, as subreaper,
kills the descendants. In both cases the filter refuses sockets, ptrace, further namespaces, commands to devices, and
shared memory that the limits do not count (System V, message queues, memfd; mappings and files are counted). Where it
cannot be installed, nothing is run.
"""

import ctypes
import json
import os
import platform
import resource
import select
import signal
import struct
import sys
import time
from pathlib import Path


CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = (
    0x00020000, 0x08000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE = 2, 4, 8, 0x4000, 0x40000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38
AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY = -100, 0x8000, 1
SYS_MOUNT_SETATTR = 442  # the same number on every architecture
# Users without an account, one for each sandbox: the limit on processes counts only its own, and no sandbox may touch
# another. A container with a map of users often has no more than 65,536 of them.
FIRST_UID, UIDS, FIRST_UID_OF_SMALL_MAP, UIDS_OF_SMALL_MAP = 0x6A000000, 1 << 22, 40000, 20000

# Numbers of the system calls refused, on x86_64 and aarch64. -1: the machine lacks the call.
ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
# Calls since Linux 5.1 have the same number everywhere. They look missing, so that the C library uses older ones
# (clone for clone3, whose flags the filter cannot see) and what a new kernel adds is refused as well.
FIRST_NEW_CALL = 424
REFUSED_ALWAYS = {
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "ptrace": (101, 117), "mount": (165, 40),
    "umount2": (166, 39), "chroot": (161, 51), "pivot_root": (155, 41), "unshare": (272, 97), "setns": (308, 268),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "bpf": (321, 280), "keyctl": (250, 219),
    "add_key": (248, 217), "request_key": (249, 218), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "open_by_handle_at": (304, 265),
    # Memory that no limit counts, and that others can see.
    "memfd_create": (319, 279), "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "semget": (64, 190),
    "semop": (65, 193), "semtimedop": (220, 192), "semctl": (66, 191), "msgget": (68, 186), "msgsnd": (69, 189),
    "msgrcv": (70, 188), "msgctl": (71, 187), "mq_open": (240, 180), "mq_unlink": (241, 181),
}  # fmt: skip
REFUSED_UNCONTAINED = {
    "open_creat": (85, -1), "truncate": (76, 45), "rename": (82, -1), "renameat": (264, 38), "renameat2": (316, 276),
    "mkdir": (83, -1), "mkdirat": (258, 34), "rmdir": (84, -1), "unlink": (87, -1), "unlinkat": (263, 35),
    "link": (86, -1), "linkat": (265, 37), "symlink": (88, -1), "symlinkat": (266, 36), "mknod": (133, -1),
    "mknodat": (259, 33), "chmod": (90, -1), "fchmod": (91, 52), "fchmodat": (268, 53), "chown": (92, -1),
    "lchown": (94, -1), "fchown": (93, 55), "fchownat": (260, 54), "utimensat": (280, 88), "utime": (132, -1),
    "utimes": (235, -1), "futimesat": (261, -1), "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "setpriority": (141, 140), "ioprio_set": (251, 30), "prlimit64": (302, 261),
    "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119), "sched_setparam": (142, 118),
    "sched_setattr": (314, 274), "migrate_pages": (256, 238), "move_pages": (279, 239),
}  # fmt: skip
# Calls refused where an argument has one of these bits: (numbers, index of the argument, bits).
REFUSED_BITS_ALWAYS = [
    ((56, 220), 0, 0x7E020000),  # clone: a new namespace
    ((53, 199), 0, 0xFFFFFFFE),  # socketpair: any family but that of Unix
    ((53, 199), 1, 2),  # of datagrams, which could be sent to any other socket
    ((16, 29), 1, 0xFFFFAB00),  # ioctl: all but terminals' and files' own, so that devices (a GPU) cannot be used
]
REFUSED_BITS_UNCONTAINED = [
    ((2, -1), 1, os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND),  # open
    ((257, 56), 2, os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND),  # openat
    ((72, 25), 1, 8),  # fcntl: F_SETOWN, F_SETSIG and F_SETOWN_EX, which send any signal to any process of the user
]
EPERM, ENOSYS = 1, 38

libc = ctypes.CDLL(None, use_errno=True)


def checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def prctl(option: int, *arguments: int) -> None:
    padded = [ctypes.c_ulong(value) for value in (*arguments, 0, 0, 0, 0)[:4]]
    checked(libc.prctl(option, *padded), f"prctl {option}")


def enter_namespaces() -> bool:
    """Give this process and its children their own network, mounts, IPC and (the children) PIDs; False if refused."""
    flags = CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0:
        return libc.unshare(flags) == 0
    if libc.unshare(flags | CLONE_NEWUSER) != 0:
        return False
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    return True


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    encoded = [None if value is None else value.encode() for value in (source, target, kind, data)]
    result = libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3])
    checked(result, f"mount {target}")


def restrict_mounts(directory: str, disk_bytes: int, owner: int | None) -> None:
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    attributes = struct.pack("QQQQ", MOUNT_ATTR_RDONLY, 0, 0, 0)
    result = libc.syscall(
        SYS_MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, attributes, ctypes.c_size_t(len(attributes))
    )
    checked(result, "mount_setattr /")
    options = f"size={disk_bytes},nr_inodes=1024,mode=0700" + (
        f",uid={owner},gid={owner}" if owner is not None else ""
    )
    mount("sandbox", directory, "tmpfs", MS_NOSUID | MS_NODEV, options)


def own_proc(is_root: bool) -> None:
    try:
        mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    except OSError:
        # Some containers forbid a new /proc. What the old one shows of root's processes is closed to the role's user,
        # and the imports need it; what it shows of the user's own processes has to be covered.
        if not is_root:
            mount("none", "/proc", "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC)


def set_limits(limits: dict) -> None:
    cpu = max(1, int(limits["cpu_seconds"]))
    for kind, soft, hard in (
        (resource.RLIMIT_CPU, cpu, cpu + 1),
        (resource.RLIMIT_AS, limits["memory_bytes"], limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"], limits["file_bytes"]),
        (resource.RLIMIT_NPROC, limits["processes"], limits["processes"]),
        (resource.RLIMIT_NOFILE, 64, 64),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        present = resource.getrlimit(kind)[1]
        if present != resource.RLIM_INFINITY:
            soft, hard = min(soft, present), min(hard, present)
        resource.setrlimit(kind, (soft, hard))


def drop_user(uid: int) -> None:
    """Become a user without rights. Not only for the rights: root is exempt from the limit on processes."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def drop_capabilities() -> None:
    """In a user namespace of its own, a process has all rights over the mounts there."""
    checked(libc.capset(struct.pack("Ii", 0x20080522, 0), bytes(24)), "capset")


def keep_library_in_reach() -> None:
    """Address Python's library through open directories.

    Root's Python may lie under a directory that no other user may enter (/root); the imports of the code under test
    start at a descriptor below it.
    """
    prefixes = {
        prefix: f"/proc/self/fd/{os.open(prefix, os.O_PATH | os.O_DIRECTORY)}"
        for prefix in sorted({sys.prefix, sys.base_prefix, os.path.realpath(sys.base_prefix)}, key=len, reverse=True)
    }

    def reachable(path: str) -> str:
        for prefix, descriptor in prefixes.items():
            if path.startswith(prefix + "/"):
                return descriptor + path[len(prefix) :]
        return path

    sys.path[:] = map(reachable, sys.path)
    for module in list(sys.modules.values()):
        if isinstance(getattr(module, "__path__", None), list):
            module.__path__[:] = map(reachable, module.__path__)
    sys.path_importer_cache.clear()


def check_library() -> None:
    if not any(os.access(f"{path}/os.py", os.R_OK) for path in sys.path):
        raise OSError(
            EPERM,
            "Python's library can be read by root only, but the code runs as a user without rights. "
            "Use a Python that every user may read, or run the training as another user than root",
        )


def seccomp_program(contained: bool) -> bytes:
    """Classic BPF program that lets all system calls through except the refused ones, which fail with EPERM."""
    machine = platform.machine()
    if machine not in ARCHITECTURES:
        raise OSError(ENOSYS, f"the sandbox's filter knows {' and '.join(ARCHITECTURES)}, not {machine}")
    audit, column = ARCHITECTURES[machine]
    load, jump_equal, jump_greater_equal, jump_set, done = 0x20, 0x15, 0x35, 0x45, 0x06
    refuse, unknown, allow, kill = 0x00050000 | EPERM, 0x00050000 | ENOSYS, 0x7FFF0000, 0x80000000
    program = [(load, 0, 0, 4), (jump_equal, 1, 0, audit), (done, 0, 0, kill), (load, 0, 0, 0)]
    # On x86_64 among these are the x32 calls.
    program += [(jump_greater_equal, 0, 1, FIRST_NEW_CALL), (done, 0, 0, unknown)]
    for numbers in (REFUSED_ALWAYS if contained else REFUSED_ALWAYS | REFUSED_UNCONTAINED).values():
        if numbers[column] >= 0:
            program += [(jump_equal, 0, 1, numbers[column]), (done, 0, 0, refuse)]
    for numbers, argument, bits in REFUSED_BITS_ALWAYS + ([] if contained else REFUSED_BITS_UNCONTAINED):
        if numbers[column] >= 0:
            program += [(jump_equal, 0, 4, numbers[column]), (load, 0, 0, 16 + 8 * argument)]
            program += [(jump_set, 0, 1, bits), (done, 0, 0, refuse), (load, 0, 0, 0)]
    program.append((done, 0, 0, allow))
    return b"".join(struct.pack("HBBI", *instruction) for instruction in program)


def install_seccomp(contained: bool) -> None:
    program = ctypes.create_string_buffer(seccomp_program(contained))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", (len(program) - 1) // 8, ctypes.addressof(program)))
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_SET_SECCOMP, 2, ctypes.addressof(header))


def sandbox_uid() -> int:
    ranges = [[int(number) for number in line.split()] for line in Path("/proc/self/uid_map").read_text().splitlines()]
    if any(first <= FIRST_UID and first + count >= FIRST_UID + UIDS for first, _, count in ranges):
        return FIRST_UID + os.getpid() % UIDS
    return FIRST_UID_OF_SMALL_MAP + os.getpid() % UIDS_OF_SMALL_MAP


def become_role(config: dict, contained: bool, uid: int | None) -> None:
    """Give up the remaining rights, for the code that runs next."""
    os.chdir(config["directory"])
    os.environ.clear()
    os.environ.update(PATH="/usr/local/bin:/usr/bin:/bin", HOME=config["directory"], TMPDIR=config["directory"])
    os.environ.update(OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1", LANG="C.UTF-8")
    set_limits(config["limits"])
    if uid is not None:
        keep_library_in_reach()
        drop_user(uid)
        check_library()
    drop_capabilities()
    # Root's sandboxes have a user each, who may read its own /proc/self. Where all are one user's, none may read the
    # memory of the one that knows the tests.
    prctl(PR_SET_DUMPABLE, int(uid is not None))
    null = os.open(os.devnull, os.O_RDWR)
    install_seccomp(contained)
    # What stderr receives is believed to come from the launcher, so the role gets another.
    os.dup2(null, 2)
    os.close(null)
    sys.excepthook = sys.__excepthook__


def kill_descendants() -> None:
    """Kill the children, and as subreaper what they leave behind, until there are none."""
    children_file = Path(f"/proc/self/task/{os.getpid()}/children")
    while True:
        children = [int(number) for number in children_file.read_text().split()]
        for kill_signal in (signal.SIGSTOP, signal.SIGKILL):  # what is stopped starts no further process
            for child in children:
                os.kill(child, kill_signal)
        try:
            while os.waitpid(-1, os.WNOHANG)[0] != 0:
                continue
        except ChildProcessError:
            return
        time.sleep(0.002)


def fork_role(config: dict, has_namespaces: bool, contained: bool, uid: int | None) -> int:
    """The child's PID; 0 in the process that runs the role."""
    pid = os.fork()
    if pid != 0:
        close_role_files()
        return pid
    os.setsid()
    if has_namespaces:
        # From here on this process is PID 1 of the namespace.
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if contained:
            own_proc(uid is not None)
        child = os.fork()
        if child != 0:
            close_role_files()
            while True:
                ended, status = os.wait()
                if ended == child:
                    os._exit(os.waitstatus_to_exitcode(status))
    become_role(config, contained, uid)
    return 0


def close_role_files() -> None:
    # A reader at the other end waits until every copy is closed.
    os.close(0)
    os.close(1)


def isolate(config: dict, uid: int | None) -> tuple[bool, bool]:
    """Whether there are namespaces, and whether they also contain writes to files."""
    if not config["namespaces"] or not enter_namespaces():
        return False, False
    try:
        restrict_mounts(config["directory"], config["limits"]["disk_bytes"], uid)
    except OSError:
        # A kernel before 5.12, or a policy that forbids mounts in a user namespace: the filter forbids writing
        # instead.
        return True, False
    return True, True


def main() -> None:
    # The caller takes whatever is on stderr for the reason why nothing was run.
    sys.excepthook = lambda kind, error, _: print(f"{kind.__name__}: {error}", file=sys.stderr)
    with open(int(sys.argv[1]), encoding="utf-8") as file:
        config = json.load(file)
    control = int(sys.argv[2])
    # Loaded before the rights are gone: this file may lie where only this user may read.
    sys.path.insert(0, str(Path(__file__).parent))
    import code_runner

    sys.path.pop(0)
    uid = sandbox_uid() if os.geteuid() == 0 else None
    prctl(PR_SET_SUBREAPER, 1)
    has_namespaces, contained = isolate(config, uid)
    prctl(PR_SET_DUMPABLE, 0)  # this process has read the tests
    pid = fork_role(config, has_namespaces, contained, uid)
    if pid == 0:
        os.close(control)
        # Python then ends as after any program: it waits for threads and writes what is left in buffers.
        return code_runner.run(config)
    role = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(role, select.POLLIN)
    poll.register(control, select.POLLIN)
    if role not in dict(poll.poll(config["limits"]["wall_seconds"] * 1000)):
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if not has_namespaces:
        kill_descendants()
    os._exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
