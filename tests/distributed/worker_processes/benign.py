"""Programs as models write them, which mean no harm: each must end without an exception in the sandbox."""

from __future__ import annotations

BENIGN = {
    "numpy linear algebra": "import numpy as np\na = np.random.default_rng(0).normal(size=(120, 120))\n"
    "assert np.allclose(np.linalg.inv(a) @ a, np.eye(120)) and np.linalg.svd(a)[1].min() > 0",
    "numpy fft and files": "import numpy as np\nnp.save('a.npy', np.fft.fft(np.arange(64.0)))\n"
    "assert np.load('a.npy', mmap_mode='r').shape == (64,)",
    "numpy large arrays": "import numpy as np\nassert (np.ones((2500, 2500)) * 2).sum() == 12.5e6",
    "numpy map in memory": "import numpy as np\nm = np.memmap('map', np.int32, 'w+', shape=(1000,))\nm[:] = 3\n"
    "m.flush()",
    "sympy": "import sympy\nx = sympy.Symbol('x')\n"
    "assert sympy.integrate(x * sympy.exp(x), x) == (x - 1) * sympy.exp(x)",
    "sqlite": "import sqlite3\nwith sqlite3.connect('base.db') as base:\n  base.execute('pragma journal_mode = wal')\n"
    "  base.execute('create table t(a)')\n  base.execute('insert into t values (1)')\n"
    "assert sqlite3.connect('base.db').execute('select * from t').fetchall() == [(1,)]",
    "sqlite with a journal": "import sqlite3\nwith sqlite3.connect('other.db') as base:\n"
    "  base.execute('create table t(a)')\n"
    "base.execute('vacuum')",
    "threads": "import threading\nfound = []\n"
    "all_ = [threading.Thread(target=found.append, args=(n,)) for n in range(20)]\n"
    "[one.start() for one in all_]; [one.join() for one in all_]\nassert sorted(found) == list(range(20))",
    "thread pool": "from concurrent.futures import ThreadPoolExecutor as P\n"
    "with P(16) as pool: assert sum(pool.map(abs, range(1000))) == 499500",
    "locks and queues": "import queue, threading\nq = queue.Queue()\nthreading.Timer(0.01, q.put, (1,)).start()\n"
    "assert q.get(timeout=30) == 1",
    "temporary files": "import tempfile\nwith tempfile.NamedTemporaryFile() as f, tempfile.TemporaryFile() as g:\n"
    "  f.write(b'x'); g.write(b'x')\nwith tempfile.TemporaryDirectory() as d: open(d + '/x', 'w').close()",
    "paths": "from pathlib import Path\nPath('a/b').mkdir(parents=True)\nPath('a/b/c').touch()\nPath('a/b/c').touch()\n"
    "assert [p.name for p in Path('a').rglob('*')] == ['b', 'c']\nPath('a/b/c').rename('a/d')\nPath('a/d').unlink()",
    "copies": "import shutil\nopen('one', 'w').write('x')\nshutil.copy('one', 'two'); shutil.copy2('one', 'three')\n"
    "shutil.move('three', 'four')\nassert open('four').read() == 'x' and shutil.disk_usage('.').free",
    "copied folder": "import os, shutil\nos.makedirs('tree/in'); open('tree/in/x', 'w').close()\n"
    "shutil.copytree('tree', 'tree2'); shutil.rmtree('tree')\nassert os.listdir('tree2/in') == ['x']",
    "archives": "import shutil, tarfile, zipfile\nopen('in.txt', 'w').write('x')\n"
    "with zipfile.ZipFile('z.zip', 'w') as z: z.write('in.txt')\n"
    "with tarfile.open('t.tgz', 'w:gz') as t: t.add('in.txt')\n"
    "zipfile.ZipFile('z.zip').extractall('out'); tarfile.open('t.tgz').extractall('out2')",
    "compression": "import bz2, gzip, lzma, zlib\nfor one in (bz2, gzip, lzma, zlib): "
    "assert one.decompress(one.compress(b'x' * 999)) == b'x' * 999",
    "deep recursion": "import sys\nsys.setrecursionlimit(100_000)\ndef f(n): return 0 if n == 0 else 1 + f(n - 1)\n"
    "assert f(20_000) == 20_000",
    "recursion in a large thread": "import sys, threading\nsys.setrecursionlimit(10 ** 6); "
    "threading.stack_size(64 << 20)\n"
    "def f(n): return 0 if n == 0 else 1 + f(n - 1)\nout = []\n"
    "t = threading.Thread(target=lambda: out.append(f(50_000))); t.start(); t.join()\nassert out == [50_000]",
    "recursion limit of the stack": "import resource\n"
    "resource.setrlimit(resource.RLIMIT_STACK, (64 << 20, resource.getrlimit(resource.RLIMIT_STACK)[1]))",
    "csv and json": "import csv, json\n"
    "with open('x.csv', 'w', newline='') as f: csv.writer(f).writerows([[1, 2], [3, 4]])\n"
    "assert json.loads(json.dumps(list(csv.reader(open('x.csv'))))) == [['1', '2'], ['3', '4']]",
    "regular expressions": "import re\nassert re.findall(r'\\d+', 'a1b22') == ['1', '22']",
    "itertools": "import itertools, functools, operator\nassert len(list(itertools.permutations(range(7)))) == 5040\n"
    "assert functools.reduce(operator.mul, range(1, 11)) == 3628800",
    "decimals and fractions": "import decimal, fractions\ndecimal.getcontext().prec = 200\n"
    "assert str(decimal.Decimal(2).sqrt()).startswith('1.41421356') and fractions.Fraction(1, 3) * 3 == 1",
    "dates": "import calendar, datetime\nassert datetime.date(2024, 2, 29).weekday() == 3 and calendar.isleap(2024)\n"
    "assert datetime.datetime.now() and datetime.datetime.now(datetime.timezone.utc).astimezone()",
    "time zones": "import zoneinfo\ntry: zoneinfo.ZoneInfo('Europe/Berlin')\n"
    "except zoneinfo.ZoneInfoNotFoundError: pass",
    "local time": "import time\ntime.tzset(); "
    "assert time.strftime('%Y', time.localtime()) > '2000' and time.process_time()",
    "heaps": "import bisect, collections, heapq\nh = [3, 1, 2]; heapq.heapify(h); assert heapq.heappop(h) == 1\n"
    "assert collections.Counter('aab')['a'] == 2 and bisect.bisect([1, 2], 2) == 2",
    "input": "import io, sys\nsys.stdin = io.StringIO('3 4\\n')\nassert sum(map(int, input().split())) == 7",
    "random": "import random, secrets, uuid\nrandom.seed(1); "
    "assert random.random() and secrets.token_hex() and uuid.uuid4()\n"
    "import os; assert len(os.urandom(8)) == 8 and uuid.uuid1()",
    "hashes": "import hashlib, hmac\nassert hashlib.sha256(b'').hexdigest().startswith('e3b0') and hashlib.scrypt\n"
    "assert hmac.new(b'k', b'x', 'sha256').digest() and hashlib.pbkdf2_hmac('sha256', b'p', b's', 1000)",
    "map of a file": "import mmap\nopen('m', 'wb').write(bytes(9999))\n"
    "with open('m', 'r+b') as f, mmap.mmap(f.fileno(), 0) as m:\n"
    "  m[5] = 7; m.flush(); m.resize(20000)\nassert open('m', 'rb').read()[5] == 7",
    "private map": "import mmap\nm = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS); m[9] = 1",
    "asyncio": "import asyncio\nasync def main():\n  q = asyncio.Queue(); await q.put(1)\n"
    "  await asyncio.gather(*(asyncio.sleep(0.001) for _ in range(50)))\n"
    "  return await asyncio.to_thread(abs, -3) + await q.get()\n"
    "assert asyncio.run(main()) == 4",
    "asyncio with signals": "import asyncio, os, signal\nasync def main():\n  got = asyncio.Event()\n"
    "  asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, got.set)\n  os.kill(os.getpid(), signal.SIGUSR1)\n"
    "  await asyncio.wait_for(got.wait(), 30)\nasyncio.run(main())",
    "sleep": "import time\nstart = time.perf_counter(); time.sleep(0.01); assert time.perf_counter() - start >= 0.009",
    "alarm": "import signal, time\ndef ring(*_): raise TimeoutError\nsignal.signal(signal.SIGALRM, ring)\n"
    "signal.setitimer(signal.ITIMER_REAL, 0.01)\ntry: time.sleep(30)\nexcept TimeoutError: pass\nsignal.alarm(0)",
    "signal to itself": "import os, signal\ngot = []\nsignal.signal(signal.SIGUSR1, lambda *a: got.append(1))\n"
    "signal.raise_signal(signal.SIGUSR1); os.kill(os.getpid(), signal.SIGUSR1); assert len(got) == 2",
    "questions about itself": "import os, platform, resource\n"
    "assert os.getpid() and os.getppid() >= 0 and os.cpu_count()\n"
    "os.getuid(); os.getpgrp(); os.getsid(0); os.getpgid(0); os.uname(); os.times(); platform.platform()\n"
    "os.sched_getaffinity(0); os.getpriority(os.PRIO_PROCESS, 0); resource.getrlimit(resource.RLIMIT_AS)\n"
    "resource.getrusage(resource.RUSAGE_SELF); os.get_terminal_size if os.isatty(1) else None",
    "nice to itself": "import os\nos.nice(1); os.sched_setaffinity(0, os.sched_getaffinity(0))",
    "lower limits": "import resource\nresource.setrlimit(resource.RLIMIT_CORE, (0, 0))",
    "subprocess refused": "import subprocess\ntry: subprocess.run(['true'])\nexcept PermissionError: pass\nelse: 1 / 0",
    "network refused": "import socket\ntry: socket.create_connection(('127.0.0.1', 1), 1)\n"
    "except PermissionError: pass\n"
    "else: 1 / 0",
    "pool of processes refused": "import multiprocessing\ntry: multiprocessing.Pool(1)\nexcept OSError: pass\n"
    "else: 1 / 0",
    "C functions": "import ctypes, math\nc = ctypes.CDLL(None)\nassert c.abs(-3) == 3\n"
    "compare = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_int))\n"
    "a = (ctypes.c_int * 3)(3, 1, 2); c.qsort(a, 3, 4, compare(lambda x, y: x[0] - y[0])); assert list(a) == [1, 2, 3]",
    "pipes": "import os, select\nr, w = os.pipe(); os.write(w, b'x')\nassert select.select([r], [], [], 1)[0] == [r]\n"
    "p = select.poll(); p.register(r, select.POLLIN); assert p.poll(10) and os.read(r, 1) == b'x'",
    "selectors": "import selectors, socket\na, b = socket.socketpair()\nwith selectors.DefaultSelector() as s:\n"
    "  s.register(b, selectors.EVENT_READ); a.sendall(b'x'); assert s.select(1) and b.recv(1) == b'x'",
    "files of many kinds": "import os\nwith open('f', 'w+') as f:\n  f.write('abc'); f.flush(); "
    "os.fsync(f.fileno()); f.truncate(1)\n"
    "os.replace('f', 'g'); os.symlink('g', 'h'); os.link('g', 'i'); assert os.readlink('h') == 'g'\n"
    "assert os.stat('g').st_size == 1 and os.access('g', os.R_OK) and sorted(os.listdir('.')) and os.statvfs('.')",
    "locks of own files": "import fcntl\nwith open('locked', 'w') as f: fcntl.lockf(f, fcntl.LOCK_EX); "
    "fcntl.lockf(f, fcntl.LOCK_UN)",
    "output": "import os, sys\nsys.stdout.write(''); sys.stderr.flush(); os.write(1, b''); "
    "sys.stdout.reconfigure(line_buffering=True)",
    "logging": "import logging, warnings\nlogging.basicConfig(filename='log'); logging.warning('x'); "
    "warnings.simplefilter('error')",
    "many imports": "import argparse, ast, base64, cmath, contextlib, copy, dataclasses, difflib, email, "
    "enum, glob, graphlib, html\n"
    "import http.client, inspect, ipaddress, locale, math, numbers, pickle, pprint, shelve, statistics, "
    "string, struct, textwrap\n"
    "import timeit, traceback, types, typing, unittest, urllib.parse, uuid, weakref, xml.etree.ElementTree",
    "unit tests": "import io, unittest\nclass T(unittest.TestCase):\n  def test(self): self.assertEqual(1, 1)\n"
    "suite = unittest.defaultTestLoader.loadTestsFromTestCase(T)\n"
    "assert unittest.TextTestRunner(stream=io.StringIO()).run(suite).wasSuccessful()",
    "modules of its own": "import sys\nopen('mine.py', 'w').write('x = 3')\nsys.path.insert(0, '.')\n"
    "import mine\nassert mine.x == 3",
    "modes and times of own files": "import os, pathlib\nopen('x', 'w').close()\nos.chmod('x', 0o600)\n"
    "pathlib.Path('x').chmod(0o644); os.utime('x', (0, 0))\n"
    "for change in (lambda: os.chmod('y', 0o600), lambda: os.utime('y')):\n  try: change()\n"
    "  except FileNotFoundError: pass\n  else: 1 / 0",
    "modes of others refused": "import os\ntry: os.chmod(os.__file__, 0o644)\nexcept PermissionError: pass\n"
    "else: 1 / 0",
    "shelves": "import dbm.dumb, pickle\nwith dbm.dumb.open('shelf', 'c') as d: d['a'] = pickle.dumps(1)\n"
    "with dbm.dumb.open('shelf') as d: assert pickle.loads(d['a']) == 1",
    "garbage and memory": "import gc, tracemalloc\ntracemalloc.start(); x = bytearray(100 << 20); del x; "
    "gc.collect(); tracemalloc.stop()",
}
