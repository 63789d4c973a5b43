//! Dying test programs, built on this machine.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// Folder with the programs, removed on drop.
pub(super) struct Programs {
    folder: PathBuf,
    /// Whether a C compiler is available, and a C++ compiler.
    pub(super) c: bool,
    pub(super) cpp: bool,
    pub(super) python: bool,
}

impl Programs {
    /// Builds as many programs as the compilers allow.
    ///
    /// # Errors
    ///
    /// If the folder cannot be created, or an available compiler fails.
    pub(super) fn build() -> Result<Self, String> {
        let folder =
            std::env::temp_dir().join(format!("cotenant-bench-autopsy-{}", std::process::id()));
        fs::create_dir_all(&folder)
            .map_err(|error| format!("cannot create `{}`: {error}", folder.display()))?;
        let runs = |program: &str| {
            let output = Command::new(program).arg("--version").output();
            output.is_ok_and(|output| output.status.success())
        };
        let programs = Self {
            folder,
            c: runs("cc"),
            cpp: runs("c++"),
            python: runs("python3"),
        };
        if programs.c {
            programs.compile("cc", "ways.c", WAYS, "ways", &[])?;
            programs.libraries()?;
        }
        if programs.cpp {
            programs.compile("c++", "bad_alloc.cc", BAD_ALLOC, "bad_alloc", &[])?;
        }
        programs.script("not_executable", "#!/bin/sh\n", 0o644)?;
        programs.script("bad_interpreter", "#!/nowhere/python3\n", 0o755)?;
        programs.foreign()?;
        Ok(programs)
    }

    pub(super) fn path(&self, name: &str) -> String {
        self.folder.join(name).to_string_lossy().into_owned()
    }

    /// Returns the path of a file in their folder.
    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    fn compile(
        &self,
        compiler: &str,
        source: &str,
        text: &str,
        out: &str,
        flags: &[&str],
    ) -> Result<(), String> {
        self.write(source, text)?;
        let output = Command::new(compiler)
            .current_dir(&self.folder)
            .args(["-O1", "-w", "-o", out, source])
            .args(flags)
            .output()
            .map_err(|error| format!("cannot run `{compiler}`: {error}"))?;
        if output.status.success() {
            return Ok(());
        }
        Err(format!(
            "`{compiler}` cannot build `{source}`: {}",
            String::from_utf8_lossy(&output.stderr)
        ))
    }

    /// Builds two programs with a missing library: one without any version of it, one with another version present.
    fn libraries(&self) -> Result<(), String> {
        let shared = |name: &str, soname: &str| {
            let soname = format!("-Wl,-soname,{soname}");
            self.compile(
                "cc",
                "library.c",
                LIBRARY,
                name,
                &["-shared", "-fPIC", &soname],
            )
        };
        shared("libgone.so", "libgone.so.3")?;
        shared("libcudart.so", "libcudart.so.12")?;
        for (program, library) in [("needs_gone", "-lgone"), ("needs_cuda", "-lcudart")] {
            self.compile("cc", "user.c", USER, program, &["-L.", library])?;
        }
        for gone in ["libgone.so", "libcudart.so"] {
            let path = self.folder.join(gone);
            fs::remove_file(&path)
                .map_err(|error| format!("cannot remove `{}`: {error}", path.display()))?;
        }
        fs::create_dir_all(self.folder.join("cuda-11")).map_err(|error| error.to_string())?;
        self.write("cuda-11/libcudart.so.11.0", "")
    }

    /// Writes an ELF file for a foreign processor.
    fn foreign(&self) -> Result<(), String> {
        let mut elf = b"\x7fELF\x02\x01\x01".to_vec();
        elf.resize(64, 0);
        for (at, byte) in [(16, 2), (18, RISC_V), (20, 1)] {
            if let Some(place) = elf.get_mut(at) {
                *place = byte;
            }
        }
        let path = self.folder.join("foreign");
        fs::write(&path, elf).map_err(|error| error.to_string())?;
        mode(&path, 0o755)
    }

    fn script(&self, name: &str, text: &str, bits: u32) -> Result<(), String> {
        self.write(name, text)?;
        mode(&self.folder.join(name), bits)
    }

    fn write(&self, name: &str, text: &str) -> Result<(), String> {
        let path = self.folder.join(name);
        fs::write(&path, text)
            .map_err(|error| format!("cannot write `{}`: {error}", path.display()))
    }
}

impl Drop for Programs {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

fn mode(path: &Path, bits: u32) -> Result<(), String> {
    use std::os::unix::fs::PermissionsExt as _;
    fs::set_permissions(path, fs::Permissions::from_mode(bits))
        .map_err(|error| format!("cannot change `{}`: {error}", path.display()))
}

/// `EM_RISCV` of elf.h.
const RISC_V: u8 = 243;

/// Ways to die; `argv[1]` selects one.
const WAYS: &str = r#"
#define _GNU_SOURCE
#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static void eat(void) {
    for (;;) {
        char *block = malloc(1 << 20);
        if (!block) _exit(4);
        memset(block, 1, 1 << 20);
    }
}

int main(int argc, char **argv) {
    const char *way = argc > 1 ? argv[1] : "";
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (!strcmp(way, "eat")) { puts("eating"); eat(); }
    if (!strcmp(way, "wait")) { puts("ready"); for (;;) pause(); }
    if (!strcmp(way, "deaf")) { signal(SIGTERM, SIG_IGN); puts("ready"); for (;;) pause(); }
    if (!strcmp(way, "hang")) { signal(SIGTERM, SIG_IGN); puts("ready"); for (;;) pause(); }
    if (!strcmp(way, "mute")) { for (;;) pause(); }
    if (!strcmp(way, "segfault")) { *(volatile int *)(size_t)(argc * 16) = 1; }
    if (!strcmp(way, "assert")) { int layers = 0; assert(layers > 0); }
    if (!strcmp(way, "limit")) {
        char *block = malloc((size_t)1 << 30);
        if (!block) { fprintf(stderr, "malloc of 1073741824 bytes: %s\n", strerror(errno)); return 1; }
        return 0;
    }
    if (!strcmp(way, "bus")) {
        FILE *file = tmpfile();
        ftruncate(fileno(file), 4096);
        volatile char *map = mmap(NULL, 4096, PROT_READ, MAP_SHARED, fileno(file), 0);
        ftruncate(fileno(file), 0);
        return map[0];
    }
    if (!strcmp(way, "illegal")) { __builtin_trap(); }
    if (!strcmp(way, "cpu")) {
        struct rlimit limit = {1, 3};
        setrlimit(RLIMIT_CPU, &limit);
        for (volatile unsigned long turns = 0;; turns++) {}
    }
    if (!strcmp(way, "forbidden")) {
        struct sock_filter filter[] = {
            BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
            BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_getppid, 0, 1),
            BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
            BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        };
        struct sock_fprog program = {4, filter};
        prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program);
        syscall(SYS_getppid);
        return 5;
    }
    if (!strcmp(way, "child")) {
        pid_t child = fork();
        if (child == 0) eat();
        waitpid(child, NULL, 0);
        return 0;
    }
    if (!strcmp(way, "pipe")) { raise(SIGPIPE); }
    return 6;
}
"#;

/// Allocates more than any machine has.
const BAD_ALLOC: &str = r#"
#include <new>
int main(int argc, char **) {
    volatile char *block = static_cast<char *>(::operator new(static_cast<unsigned long>(argc) << 46));
    block[0] = 1;
    return 0;
}
"#;

const LIBRARY: &str = "int answer(void) { return 42; }\n";

const USER: &str = "int answer(void); int main(void) { return answer(); }\n";
