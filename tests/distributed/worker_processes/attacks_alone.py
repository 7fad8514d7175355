"""Attacks that each need a program of their own: they take too much, or end their process."""

from __future__ import annotations

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
    "removed files, open": "files = []\nfor n in range(60):\n  files.append(open('removed', 'wb'))\n"
    "  files[-1].write(bytes(15 << 20)); files[-1].flush(); os.unlink('removed')\nimport time; time.sleep(1)",
    "removed files, mapped": "import mmap\nmaps = []\nfor n in range(60):\n  with open('removed', 'w+b') as file:\n"
    "    file.write(bytes(15 << 20)); file.flush(); os.unlink('removed'); maps.append(mmap.mmap(file.fileno(), 4096))\n"
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
