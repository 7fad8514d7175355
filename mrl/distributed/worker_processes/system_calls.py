"""Numbers of Linux's system calls on x86_64 and aarch64, grouped by the filters that use them.

Source: Linux headers asm/unistd_64.h and asm-generic/unistd.h; Linux never changes a number.
"""

from __future__ import annotations

NEWEST = 462
"""Highest number that was assigned when PROGRAMS was written; higher ones belong to newer kernels."""


def _table(text: str) -> dict[str, tuple[int | None, int | None]]:
    """Parses words `name:x86_64:aarch64` into name -> numbers; None where an architecture lacks the call."""
    rows = (word.split(":") for word in text.split())
    return {name: (int(x86) if x86 else None, int(arm) if arm else None) for name, x86, arm in rows}


PROGRAMS = _table("""
read:0:63 write:1:64 readv:19:65 writev:20:66 pread64:17:67 pwrite64:18:68 preadv:295:69 pwritev:296:70
preadv2:327:286 pwritev2:328:287 lseek:8:62 close:3:57 close_range:436:436 dup:32:23 dup2:33: dup3:292:24
fcntl:72:25 ioctl:16:29 open:2: openat:257:56 creat:85: fsync:74:82 fdatasync:75:83 ftruncate:77:46
fallocate:285:47 copy_file_range:326:285 sendfile:40:71 pipe:22: pipe2:293:59 stat:4: lstat:6: fstat:5:80
newfstatat:262:79 statx:332:291 statfs:137:43 fstatfs:138:44 access:21: faccessat:269:48 faccessat2:439:439
readlink:89: readlinkat:267:78 getcwd:79:17 chdir:80:49 fchdir:81:50 getdents:78: getdents64:217:61 mkdir:83:
mkdirat:258:34 rmdir:84: unlink:87: unlinkat:263:35 rename:82: renameat:264:38 renameat2:316:276 link:86:
linkat:265:37 symlink:88: symlinkat:266:36 umask:95:166 mmap:9:222 munmap:11:215 mremap:25:216 mprotect:10:226
msync:26:227 madvise:28:233 brk:12:214 mbind:237:235 get_mempolicy:239:236 membarrier:324:283 futex:202:98
futex_waitv:449:449 futex_wake:454:454 futex_wait:455:455 futex_requeue:456:456 set_robust_list:273:99
rseq:334:293 set_tid_address:218:96 clone:56:220 arch_prctl:158: prctl:157:167 exit:60:93 exit_group:231:94
wait4:61:260 waitid:247:95 poll:7: ppoll:271:73 select:23: pselect6:270:72 epoll_create:213:
epoll_create1:291:20 epoll_ctl:233:21 epoll_wait:232: epoll_pwait:281:22 epoll_pwait2:441:441 eventfd:284:
eventfd2:290:19 timerfd_create:283:85 timerfd_settime:286:86 timerfd_gettime:287:87 signalfd:282:
signalfd4:289:74 socketpair:53:199 sendto:44:206 recvfrom:45:207 shutdown:48:210 getsockopt:55:209
getsockname:51:204 getpeername:52:205 rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139
rt_sigpending:127:136 rt_sigtimedwait:128:137 rt_sigsuspend:130:133 sigaltstack:131:132 pause:34: alarm:37:
setitimer:38:103 getitimer:36:102 kill:62:129 tgkill:234:131 restart_syscall:219:128 nanosleep:35:101
clock_nanosleep:230:115 clock_gettime:228:113 clock_getres:229:114 gettimeofday:96:169 time:201: times:100:153
getrusage:98:165 sysinfo:99:179 uname:63:160 getcpu:309:168 getrandom:318:278 sched_yield:24:124 getpid:39:172
getppid:110:173 gettid:186:178 getuid:102:174 geteuid:107:175 getgid:104:176 getegid:108:177 getresuid:118:148
getresgid:120:150 getgroups:115:158 getpgrp:111: getpgid:121:155 getsid:124:156 getrlimit:97:163
setrlimit:160:164 prlimit64:302:261 getpriority:140:141 setpriority:141:140 sched_getaffinity:204:123
sched_setaffinity:203:122 sched_getparam:143:121 sched_getscheduler:145:120 sched_get_priority_max:146:125
sched_get_priority_min:147:126 map_shadow_stack:453:453
""")
"""Calls that an untrusted program may make: memory, files, threads, timers and queries about its own process."""

SHARED = _table("""
add_key:248:217 request_key:249:218 keyctl:250:219 shmget:29:194 shmat:30:196 shmctl:31:195 shmdt:67:197
semget:64:190 semop:65:193 semtimedop:220:192 semctl:66:191 msgget:68:186 msgsnd:69:189 msgrcv:70:188
msgctl:71:187 mq_open:240:180 mq_unlink:241:181 unshare:272:97 setns:308:268 mount:165:40 umount2:166:39
pivot_root:155:41 chroot:161:51 move_mount:429:429 open_tree:428:428 fsopen:430:430 fsconfig:431:431
fsmount:432:432 fspick:433:433 mount_setattr:442:442 open_by_handle_at:304:265 bpf:321:280
perf_event_open:298:241 userfaultfd:323:282 fanotify_init:300:262 fanotify_mark:301:263 init_module:175:105
finit_module:313:273 delete_module:176:106 kexec_load:246:104 kexec_file_load:320:294 reboot:169:142
swapon:167:224 swapoff:168:225 acct:163:89 quotactl:179:60 quotactl_fd:443:443 syslog:103:116 vhangup:153:58
sethostname:170:161 setdomainname:171:162 iopl:172: ioperm:173: settimeofday:164:170 clock_settime:227:112
clock_adjtime:305:266 adjtimex:159:171 migrate_pages:256:238 move_pages:279:239
""")
"""Calls that read or change shared state: System V objects, keys, namespaces, mounts, clocks, the kernel."""

OTHERS = _table("""
socket:41:198 clone3:435:435 io_uring_setup:425:425 truncate:76:45 openat2:437:437 tkill:200:130
rt_sigqueueinfo:129:138 rt_tgsigqueueinfo:297:240 pidfd_open:434:434 pidfd_send_signal:424:424
sched_setscheduler:144:119 sched_setparam:142:118 sched_setattr:314:274 ioprio_set:251:30 capset:126:91
seccomp:317:277
""")
"""Other calls that a filter names."""
