"""Programs that try to have an effect outside their sandbox: each ends without an exception where it has it.

They see: `victim`, the process id of a foreign process of the same user; `outside`, a folder of that user with the
files `text` (mode 640, an extended attribute where the file system has them) and `folder/inner`; `own`, the folder in
which a program may write; `call(name, *arguments)`, a system call by name, which raises where Linux refuses it.
"""

from __future__ import annotations

# Numbers on x86_64 and aarch64 of calls that Python does not have.
NUMBERS = {
    "acct": (163, 89), "add_key": (248, 217), "adjtimex": (159, 171), "bpf": (321, 280), "chroot": (161, 51),
    "clock_adjtime": (305, 266), "clock_settime": (227, 112), "clone": (56, 220), "clone3": (435, 435),
    "delete_module": (176, 106), "execveat": (322, 281), "fanotify_init": (300, 262), "fchmodat2": (452, 452),
    "finit_module": (313, 273), "fsopen": (430, 430), "init_module": (175, 105), "inotify_init1": (294, 26),
    "io_setup": (206, 0), "io_uring_setup": (425, 425), "ioprio_set": (251, 30), "kcmp": (312, 272),
    "kexec_load": (246, 104), "keyctl": (250, 219), "landlock_create_ruleset": (444, 444), "lookup_dcookie": (212, 18),
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "migrate_pages": (256, 238), "mlock": (149, 228),
    "mlockall": (151, 230), "mount": (165, 40), "mount_setattr": (442, 442), "move_mount": (429, 429),
    "move_pages": (279, 239), "mq_open": (240, 180), "msgget": (68, 186), "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265), "open_tree": (428, 428), "openat2": (437, 437), "perf_event_open": (298, 241),
    "personality": (135, 92), "pidfd_getfd": (438, 438), "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424),
    "pivot_root": (155, 41), "prctl": (157, 167), "process_madvise": (440, 440), "process_mrelease": (448, 448),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "ptrace": (101, 117), "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "readahead": (187, 213), "reboot": (169, 142), "remap_file_pages": (216, 234), "renameat2": (316, 276),
    "request_key": (249, 218), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "sched_setattr": (314, 274), "seccomp": (317, 277), "semget": (64, 190), "sethostname": (170, 161),
    "setns": (308, 268), "settimeofday": (164, 170), "shmat": (30, 196), "shmget": (29, 194), "splice": (275, 76),
    "swapoff": (168, 225), "sync": (162, 81), "swapon": (167, 224), "syncfs": (306, 267), "syslog": (103, 116),
    "tee": (276, 77),
    "timer_create": (222, 107), "tkill": (200, 130), "umount2": (166, 39), "unshare": (272, 97),
    "userfaultfd": (323, 282), "vhangup": (153, 58), "vmsplice": (278, 75), "ustat": (136, 0), "sysfs": (139, 0),
}  # fmt: skip

PRELUDE = f"""
import ctypes, errno, os, platform, socket, struct, sys
own = os.environ.get('HOME')
_numbers = {NUMBERS!r}
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
def call(name, *arguments):
    number = _numbers[name][platform.machine() == "aarch64"]
    given = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
    result = _libc.syscall(ctypes.c_long(number), *given)
    if result < 0:
        raise OSError(ctypes.get_errno(), name)
    return result
def reaches(name, *arguments):
    try:
        call(name, *arguments)
    except OSError as error:
        if error.errno in (errno.EPERM, errno.ENOSYS, errno.EACCES):
            raise
"""

OF_PROCESSES = {
    "kill": "os.kill(victim, 9)",
    "stop": "os.kill(victim, 19)",
    "signal 0": "os.kill(victim, 0)",
    "kill everything": "os.kill(-1, 0)",
    "kill group": "os.killpg(os.getpgid(victim), 9)",
    "kill own group": "os.kill(0, 0)",
    "kill parent": "os.kill(os.getppid(), 0)",
    "tkill": "call('tkill', victim, 9)",
    "sigqueue": "call('rt_sigqueueinfo', victim, 9, bytes(128))",
    "tgsigqueue": "call('rt_tgsigqueueinfo', victim, victim, 9, bytes(128))",
    "pidfd signal": "call('pidfd_send_signal', call('pidfd_open', victim, 0), 9, None, 0)",
    "pidfd": "os.pidfd_open(victim)",
    "pidfd_getfd": "call('pidfd_getfd', call('pidfd_open', victim, 0), 0, 0)",
    "processor time": "import resource; resource.prlimit(victim, resource.RLIMIT_CPU, (0, 0))",
    "open files": "import resource; resource.prlimit(victim, resource.RLIMIT_NOFILE, (0, 0))",
    "address space": "import resource; resource.prlimit(victim, resource.RLIMIT_AS, (0, 0))",
    "limits of the parent": "import resource\nparent = os.getppid()\nassert parent\n"
    "resource.prlimit(parent, resource.RLIMIT_CORE, resource.prlimit(parent, resource.RLIMIT_CORE))",
    "read limits": "import resource; resource.prlimit(victim, resource.RLIMIT_CPU)",
    "nice": "os.setpriority(os.PRIO_PROCESS, victim, 19)",
    "nice group": "os.setpriority(os.PRIO_PGRP, os.getpgid(victim), 19)",
    "nice user": "os.setpriority(os.PRIO_USER, os.getuid(), 19)",
    "affinity": "os.sched_setaffinity(victim, {min(os.sched_getaffinity(0))})",
    "idle": "os.sched_setscheduler(victim, os.SCHED_IDLE, os.sched_param(0))",
    "batch": "os.sched_setscheduler(victim, os.SCHED_BATCH, os.sched_param(0))",
    "sched_setparam": "os.sched_setparam(victim, os.sched_param(0))",
    "sched_setattr": "call('sched_setattr', victim, struct.pack('=IIQiIQQQ', 48, 5, 0, 0, 0, 0, 0, 0), 0)",
    "ioprio": "call('ioprio_set', 1, victim, 3 << 13)",
    "ioprio of the user": "call('ioprio_set', 3, os.getuid(), 3 << 13)",
    "ptrace": "call('ptrace', 16, victim, 0, 0)",
    "ptrace seize": "call('ptrace', 0x4206, victim, 0, 0)",
    "read memory": "reaches('process_vm_readv', victim, bytes(16), 1, bytes(16), 1, 0)",
    "write memory": "reaches('process_vm_writev', victim, bytes(16), 1, bytes(16), 1, 0)",
    "compare": "call('kcmp', os.getpid(), victim, 0, 0, 0)",
    "move pages": "call('move_pages', victim, 0, None, None, None, 2)",
    "migrate pages": "call('migrate_pages', victim, 64, bytes(8), bytes(8))",
    "process_madvise": "reaches('process_madvise', 3, bytes(16), 1, 21, 0)",
    "process_mrelease": "reaches('process_mrelease', 3, 0)",
    "signals by input": "import fcntl\nread, write = os.pipe()\nfcntl.fcntl(read, fcntl.F_SETOWN, victim)",
    "signals by number": "import fcntl\nread, write = os.pipe()\nfcntl.fcntl(read, 10, 9)",
    "signals to a thread": "import fcntl\nread, write = os.pipe()\nfcntl.fcntl(read, 15, struct.pack('ii', 0, victim))",
    "timer on a thread": "call('timer_create', 1, struct.pack('=QiiiI', 0, 9, 4, victim, 0) + bytes(40), bytes(8))",
    "its memory file": "open(f'/proc/{victim}/mem', 'rb')",
    "its environment": "open(f'/proc/{victim}/environ', 'rb').read()",
    "its command line": "open(f'/proc/{victim}/cmdline', 'rb').read()",
    "its program": "os.readlink(f'/proc/{victim}/exe')",
    "its folder": "os.listdir(f'/proc/{victim}/cwd')",
    "its descriptors": "os.listdir(f'/proc/{victim}/fd')",
    "its root": "os.listdir(f'/proc/{victim}/root')",
    "out of memory score": "open(f'/proc/{victim}/oom_score_adj', 'w').write('1000')",
    "list of processes": "os.listdir('/proc')",
    "group": "os.getpgid(victim)",
    "session": "os.getsid(victim)",
    "scheduler of another": "os.sched_getscheduler(victim)",
    "own group": "os.setpgid(0, 0)",
    "own session": "os.setsid()",
    "subreaper": "call('prctl', 36, 1, 0, 0, 0)",
    "no parent's death": "call('prctl', 1, 0, 0, 0, 0)",
    "dumpable": "call('prctl', 4, 1, 0, 0, 0)",
    "any tracer": "call('prctl', 0x59616d61, -1, 0, 0, 0)",
}

OF_NEW_PROCESSES = {
    "fork": "os.fork() or os._exit(0)",
    "forkpty": "import pty; pty.fork()[0] or os._exit(0)",
    "vfork": "import subprocess; subprocess.run([sys.executable, '-c', ''])",
    "shell": "assert os.system('true') == 0",
    "spawn": "os.posix_spawn('/bin/true', ['true'], {})",
    "exec": "os.execv('/bin/true', ['true'])",
    "execveat": "reaches('execveat', -100, b'/bin/true', None, None, 0)",
    "clone": "call('clone', 17, 0, 0, 0, 0) or os._exit(0)",
    "clone with a parent": "call('clone', 0x8000 | 17, 0, 0, 0, 0) or os._exit(0)",
    "clone into a namespace": "call('clone', 0x10000000 | 17, 0, 0, 0, 0) or os._exit(0)",
    "clone without memory": "call('clone', 0x100 | 17, 0, 0, 0, 0) or os._exit(0)",
    "clone3": "call('clone3', struct.pack('=8Q', 0, 0, 0, 0, 17, 0, 0, 0), 64) or os._exit(0)",
    "daemon": "if os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0: import time; time.sleep(600)\n  os._exit(0)",
    "multiprocessing": "import multiprocessing as m\nif m.get_context('fork').Process(target=int).start(): pass",
    "process pool": "from concurrent.futures import ProcessPoolExecutor as P\nlist(P(1).map(abs, [1]))",
}

OF_FILES = {
    "write": "open(f'{outside}/text', 'w').write('changed')",
    "append": "open(f'{outside}/text', 'a').write('changed')",
    "truncate": "os.truncate(f'{outside}/text', 0)",
    "truncate by reading": "os.open(f'{outside}/text', os.O_RDONLY | os.O_TRUNC)",
    "truncate own library": "os.open(os.__file__, os.O_RDONLY | os.O_TRUNC)",
    "create": "open(f'{outside}/new', 'w')",
    "remove": "os.unlink(f'{outside}/text')",
    "remove folder": "os.rmdir(f'{outside}/folder/inner')",
    "make folder": "os.mkdir(f'{outside}/new')",
    "rename": "os.rename(f'{outside}/text', f'{outside}/other')",
    "rename away": "os.rename(f'{outside}/text', 'text')",
    "exchange": "open('own-text', 'w').close()\n"
    "call('renameat2', -100, b'own-text', -100, f'{outside}/text'.encode(), 2)",
    "hard link": "os.link(f'{outside}/text', 'text-link')",
    "hard link of a library": "os.link(os.__file__, 'library-link')",
    "symbolic link there": "os.symlink('/', f'{outside}/link')",
    "through a link": "os.symlink(outside, 'way')\nopen('way/text', 'w')",
    "through a link, mode": "os.symlink(f'{outside}/text', 'way-mode')\nos.chmod('way-mode', 0o777)",
    "mode": "os.chmod(f'{outside}/text', 0o4777)",
    "mode of a folder": "os.chmod(outside, 0)",
    "mode without following": "call('fchmodat2', -100, f'{outside}/text'.encode(), 0o777, 0x100)",
    "mode by descriptor": "os.fchmod(os.open(os.__file__, os.O_RDONLY), 0o4777)",
    "mode by path descriptor": "os.chmod(f'/proc/self/fd/{os.open(outside, os.O_PATH)}', 0)",
    "mode of own file": "open('own-mode', 'w').close()\nos.chmod('own-mode', 0o4777)\n"
    "assert os.stat('own-mode').st_mode & 0o4000",
    "owner": "os.chown(f'{outside}/text', os.getuid(), os.getgid())",
    "owner of a link": "os.lchown(f'{outside}/text', os.getuid(), os.getgid())",
    "owner by descriptor": "os.fchown(os.open(os.__file__, os.O_RDONLY), os.getuid(), os.getgid())",
    "times": "os.utime(f'{outside}/text', (0, 0))",
    "times now": "os.utime(f'{outside}/text')",
    "times by descriptor": "os.utime(os.open(os.__file__, os.O_RDONLY), (0, 0))",
    "attribute": "os.setxattr(f'{outside}/text', 'user.mrl', b'changed')",
    "remove attribute": "os.removexattr(f'{outside}/text', 'user.mrl')",
    "attribute of own file": "open('own-attribute', 'w').close()\nos.setxattr('own-attribute', 'user.x', b'x' * 1000)",
    "flags": "import fcntl\nfcntl.ioctl(os.open(os.__file__, os.O_RDONLY), 0x40086602, struct.pack('l', 0x10))",
    "read": "assert 'secret' in open(f'{outside}/text').read()",
    "list": "os.listdir(outside)",
    "walk": "assert list(os.scandir(os.path.dirname(outside)))",
    "read passwords": "open('/etc/shadow').read()",
    "read hosts": "open('/etc/hostname').read() and open('/etc/passwd').read()",
    "read home": "os.listdir(os.path.expanduser('~root'))",
    "read kernel log": "open('/dev/kmsg', 'rb')",
    "read memory": "open('/dev/mem', 'rb')",
    "read system": "os.listdir('/sys')",
    "read own command line": "open('/proc/self/cmdline').read()",
    "read own maps": "open('/proc/self/maps').read()",
    "read environment of init": "open('/proc/1/environ', 'rb').read()",
    "mounts": "open('/proc/mounts').read()",
    "terminal": "open('/dev/tty')",
    "shared memory folder": "open('/dev/shm/mrl-attack', 'w')",
    "temporary folder": "open('/tmp/mrl-attack', 'w')",
    "by handle": "reaches('name_to_handle_at', -100, outside.encode(), bytes(200), bytes(8), 0)",
    "open by handle": "reaches('open_by_handle_at', -100, bytes(200), 0)",
    "openat2": "call('openat2', -100, f'{outside}/text'.encode(), struct.pack('=QQQ', 0, 0, 0), 24)",
    "fanotify": "call('fanotify_init', 0, 0)",
    "inotify": "call('inotify_init1', 0)",
    "lease": "import fcntl\nfcntl.fcntl(os.open(os.__file__, os.O_RDONLY), fcntl.F_SETLEASE, fcntl.F_RDLCK)",
    "notify": "import fcntl\nfcntl.fcntl(os.open('/usr', os.O_RDONLY), fcntl.F_NOTIFY, fcntl.DN_MODIFY)",
    "lock of a library": "import fcntl\nfcntl.flock(open(os.__file__), fcntl.LOCK_EX | fcntl.LOCK_NB)",
    "device": "os.mknod('device', 0o20666, os.makedev(1, 3))",
    "pipe in the folder": "os.mkfifo('fifo')",
    "socket in the folder": "s = socket.socket(socket.AF_UNIX); s.bind('socket')",
    "own folder away": "os.rename(own, own + '-away')",
    "own folder gone": "os.chdir('/')\nos.rmdir(own)",
    "setuid": "os.setuid(0 if os.getuid() else 1)",
    "root": "os.chroot('.')",
    "root folder": "call('pivot_root', b'.', b'.')",
    "sync": "call('sync')",
    "syncfs": "call('syncfs', os.open('.', os.O_RDONLY))",
}

OF_NETWORK = {
    "tcp": "socket.socket()",
    "udp": "socket.socket(type=socket.SOCK_DGRAM)",
    "ipv6": "socket.socket(socket.AF_INET6)",
    "unix": "socket.socket(socket.AF_UNIX)",
    "raw": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "netlink": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "crypto": "socket.socket(38, socket.SOCK_SEQPACKET)",
    "vsock": "socket.socket(40)",
    "datagrams to a path": "a, b = socket.socketpair(type=socket.SOCK_DGRAM)\na.sendto(b'x', f'{outside}/socket')",
    "datagrams to a name": "a, b = socket.socketpair(type=socket.SOCK_DGRAM)\na.sendto(b'x', '\\0' + outside)",
    "stream to a path": "a, b = socket.socketpair()\na.connect(f'{outside}/socket')",
    "pair of other families": "socket.socketpair(socket.AF_INET, socket.SOCK_STREAM)",
    "listen": "a, b = socket.socketpair()\na.bind('\\0mrl-attack')",
    "pass descriptors": "a, b = socket.socketpair()\nsocket.send_fds(a, [b'x'], [0])",
    "io_uring": "call('io_uring_setup', 1, bytes(120))",
    "url": "import urllib.request; urllib.request.urlopen('http://127.0.0.1:1/', timeout=1)",
}

OF_THE_KERNEL = {
    "shared memory": "call('shmat', call('shmget', 0x6d726c, 1 << 20, 0o1600), 0, 0)",
    "private shared memory": "call('shmget', 0, 300 << 20, 0o1600)",
    "semaphores": "call('semget', 0x6d726c, 1, 0o1600)",
    "messages": "call('msgget', 0x6d726c, 0o1600)",
    "message queue": "call('mq_open', b'mrl-attack', os.O_CREAT | os.O_RDWR, 0o600, None)",
    "key": "call('add_key', b'user', b'mrl-attack', b'x', 1, -4)",
    "request key": "reaches('request_key', b'user', b'mrl-attack', None, 0)",
    "keyring": "call('keyctl', 0, -4, 1)",
    "user namespace": "call('unshare', 0x10000000)",
    "mount namespace": "call('unshare', 0x10020000)",
    "network namespace": "call('unshare', 0x50000000)",
    "enter a namespace": "reaches('setns', os.open('.', os.O_RDONLY), 0)",
    "mount": "reaches('mount', b'none', b'.', b'tmpfs', 0, None)",
    "unmount": "reaches('umount2', b'.', 0)",
    "fsopen": "reaches('fsopen', b'tmpfs', 0)",
    "open_tree": "reaches('open_tree', -100, b'.', 0)",
    "move_mount": "reaches('move_mount', -100, b'.', -100, b'.', 0)",
    "mount_setattr": "reaches('mount_setattr', -100, b'.', 0, bytes(32), 32)",
    "bpf": "reaches('bpf', 0, bytes(128), 128)",
    "perf": "reaches('perf_event_open', bytes(128), 0, -1, -1, 0)",
    "userfaultfd": "call('userfaultfd', 1)",
    "personality": "call('personality', 0x0040000)",
    "module": "reaches('init_module', bytes(8), 8, b'')",
    "module file": "reaches('finit_module', 0, b'', 0)",
    "remove module": "reaches('delete_module', b'mrl-attack', 0)",
    "kexec": "reaches('kexec_load', 0, 0, None, 0)",
    "reboot": "reaches('reboot', 0xfee1dead, 672274793, 0x89abcdef, None)",
    "swap on": "reaches('swapon', b'/mrl-attack', 0)",
    "swap off": "reaches('swapoff', b'/mrl-attack')",
    "accounting": "reaches('acct', b'/mrl-attack')",
    "quota": "reaches('quotactl', 0x800001, b'/', 0, None)",
    "quota by descriptor": "reaches('quotactl_fd', 0, 0x800001, 0, None)",
    "kernel log": "reaches('syslog', 10, None, 0)",
    "host name": "reaches('sethostname', b'', 0)",
    "clock": "reaches('settimeofday', None, None)",
    "clock of the machine": "import time; time.clock_settime(time.CLOCK_REALTIME, time.time())",
    "clock drift": "call('adjtimex', bytes(208))",
    "clock drift by name": "call('clock_adjtime', 0, bytes(208))",
    "hang up": "reaches('vhangup')",
    "type for others": "import fcntl\nfcntl.ioctl(0, 0x5412, b'x')",
    "seccomp": "call('seccomp', 2, 0, struct.pack('=I', 0x7fc00000))",
    "landlock": "call('landlock_create_ruleset', None, 0, 1)",
    "priority": "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))",
    "asynchronous input": "reaches('io_setup', 1, bytes(8))",
    "splice": "read, write = os.pipe()\nreaches('splice', read, None, write, None, 1, 2)",
    "vmsplice": "read, write = os.pipe()\nreaches('vmsplice', write, bytes(16), 0, 0)",
    "tee": "read, write = os.pipe()\nreaches('tee', read, write, 1, 2)",
    "pipe size": "import fcntl\nread, write = os.pipe()\nfcntl.fcntl(write, 1031, 1 << 20)",
    "lock memory": "call('mlock', ctypes.create_string_buffer(4096), 4096)",
    "lock all memory": "call('mlockall', 2)",
    "secret memory": "call('memfd_secret', 0)",
    "memory file": "os.memfd_create('mrl')",
    "memory file by number": "call('memfd_create', b'mrl', 0)",
    "shared anonymous memory": "import mmap; mmap.mmap(-1, 4096)",
    "zero device": "open('/dev/zero', 'r+b')",
    "open files": "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))",
    "raise memory": "import resource; resource.setrlimit(resource.RLIMIT_DATA, (1 << 40, 1 << 40))",
    "raise file size": "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))",
    "raise processor time": "import resource; resource.setrlimit(resource.RLIMIT_CPU, (-1, -1))",
    "hugepages": "import mmap; mmap.mmap(-1, 2 << 20, flags=0x40000 | 0x22)",
    "memory that grows down": "import mmap; mmap.mmap(-1, 4096, flags=0x100 | 0x22)",
}

CALM = {
    f"{kind}: {name}": source
    for kind, table in {
        "processes": OF_PROCESSES,
        "new processes": OF_NEW_PROCESSES,
        "files": OF_FILES,
        "network": OF_NETWORK,
        "kernel": OF_THE_KERNEL,
    }.items()
    for name, source in table.items()
}
"""Several of them run one after the other in one program."""

MEMORY_MB = 256
_MAP = """
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
place = _libc.mmap(None, 600 << 20, {protection}, {flags}, -1, 0)
assert place not in (None, ctypes.c_void_p(-1).value)
"""
_MAKE_WRITABLE = """
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
assert _libc.mprotect(place, 600 << 20, 3) == 0
ctypes.memset(place, 1, 600 << 20)
"""
_FILL = "\nfor place in range(0, len(held), 4096): held[place] = 1"

ALONE = {
    "memory": "held = bytearray(600 << 20)",
    "memory in pieces": "held = [bytearray(8 << 20) for _ in range(80)]",
    "memory, mapped": "import mmap\nheld = mmap.mmap(-1, 600 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)"
    + _FILL,
    "memory, read only first": _MAP.format(protection=1, flags=0x22) + _MAKE_WRITABLE,
    "memory, growing down": _MAP.format(protection=3, flags=0x122) + _MAKE_WRITABLE,
    "memory, shared": _MAP.format(protection=3, flags=0x21) + _MAKE_WRITABLE,
    "memory, shared with a check": _MAP.format(protection=3, flags=0x23) + _MAKE_WRITABLE,
    "memory of the zero device": "import mmap\nfile = os.open('/dev/zero', os.O_RDONLY)\n"
    "held = mmap.mmap(file, 600 << 20, prot=mmap.PROT_READ)\n"
    "assert not any(held[p] for p in range(0, len(held), 4096))",
    "memory in threads": "import threading\nthreading.stack_size(32 << 20)\nevent = threading.Event()\n"
    "for _ in range(40): threading.Thread(target=event.wait, daemon=True).start()",
    "memory on the stack": "import resource\n"
    "resource.setrlimit(resource.RLIMIT_STACK, (2 << 30, resource.RLIM_INFINITY))\n"
    "sys.setrecursionlimit(10 ** 9)\ndepth = 0\n"
    "class Deep:\n  def __repr__(self):\n    global depth\n    depth += 1\n"
    "    return '' if depth > 2_000_000 else repr(self)\nrepr(Deep())",
    "memory in a database": "import sqlite3\nbase = sqlite3.connect(':memory:')\nbase.execute('create table t(a)')\n"
    "for _ in range(80): base.execute('insert into t values (zeroblob(8388608))')",
    "memory in pipes": "pipes = []\nfor _ in range(9000):\n  pair = os.pipe(); os.set_blocking(pair[1], False)\n"
    "  os.write(pair[1], bytes(65536)); pipes.append(pair)",
    "memory in sockets": "pairs = []\nfor _ in range(3000):\n  pair = socket.socketpair(); pair[0].setblocking(False)\n"
    "  pair[0].send(bytes(200000)); pairs.append(pair)",
    "threads": "import threading\nevent = threading.Event()\nthreading.stack_size(65536)\n"
    "for _ in range(3000): threading.Thread(target=event.wait, daemon=True).start()\nimport time; time.sleep(2)",
    "large file": "open('large', 'wb').write(bytes(32 << 20))",
    "large file, sparse": "open('sparse', 'wb').truncate(1 << 40)",
    "large file, mapped": "import mmap\nfile = open('mapped', 'w+b')\nfile.truncate(600 << 20)",
    "large file, allocated": "os.posix_fallocate(os.open('allocated', os.O_CREAT | os.O_RDWR), 0, 600 << 20)",
    "many large files": "for n in range(100): open(f'large{n}', 'wb').write(bytes(8 << 20))\n"
    "import time; time.sleep(1)",
    "many files": "for n in range(200_000): open(f'file{n}', 'w').close()",
    "many folders": "for n in range(200_000): os.mkdir(f'folder{n}')",
    "many links": "for n in range(200_000): os.symlink('x', f'link{n}')",
    "folder that cannot be listed": "os.mkdir('hidden', 0o300)\nblock = bytes(8 << 20)\n"
    "for n in range(20): open(f'hidden/{n}', 'wb').write(block)\nimport time; time.sleep(1)",
    "folders with long names": "block = bytes(8 << 20)\nfor n in range(25): os.mkdir('n' * 250); os.chdir('n' * 250)\n"
    "for n in range(20): open(str(n), 'wb').write(block)\nimport time; time.sleep(1)",
    "deep folders": "for n in range(5000):\n  os.mkdir('d'); os.chdir('d')\n",
    "deep folders with files": "block = bytes(1 << 20)\nfor n in range(200):\n  os.mkdir('d'); os.chdir('d')\n"
    "  open('f', 'wb').write(block)",
    "archive that unpacks": "import zlib\nsmall = zlib.compressobj(9)\nblock = bytes(1 << 20)\n"
    "with open('packed', 'wb') as file:\n  for n in range(200): file.write(block)",
    "output": "while True: os.write(1, b'x' * 65536)",
    "output on the other stream": "while True: os.write(2, b'x' * 65536)",
    "silence": "os.close(1); os.close(2)\nimport time; time.sleep(600)",
    "stopped": "os.kill(os.getpid(), 19)",
    "ignores signals": "import signal, time\nfor n in {*range(1, 65)} - {9, 19, 32, 33}:\n"
    "  signal.signal(n, signal.SIG_IGN)\n"
    "time.sleep(600)",
    "inherited descriptors": "held, null = [], os.stat('/dev/null')\nfor n in range(3, 256):\n"
    "  try: held.append(os.fstat(n))\n  except OSError: pass\n"
    "assert [one for one in held if not os.path.samestat(one, null)]",
    "standard input": "assert os.read(0, 1)",
    "32-bit system calls": "import mmap\nassert platform.machine() == 'x86_64'\n"
    "page = mmap.mmap(-1, 4096, flags=0x22, prot=7)\n"
    "page.write(bytes.fromhex('53 b8 14 00 00 00 cd 80 5b c3'))  # getpid by int 0x80\n"
    "ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()",
    "other calling convention": "_libc.syscall(ctypes.c_long(0x40000000 + 57)) >= 0 or 1 / 0",
}
"""Each runs in a program of its own; "effect" is what it prints at its end."""
