//! Where the file lies, and whether what is committed there stays.

use std::path::{Path, PathBuf};

/// File systems whose locks and shared memory other machines don't see (<https://sqlite.org/wal.html>).
const REMOTE: [&str; 11] = [
    "9p",
    "afs",
    "ceph",
    "cifs",
    "fuse.glusterfs",
    "fuse.sshfs",
    "lustre",
    "nfs",
    "nfs4",
    "smb3",
    "smbfs",
];
/// File systems that end with the machine or with the container.
const PASSING: [&str; 3] = ["overlay", "ramfs", "tmpfs"];

/// A sentence for the log, when the place is a bad one. Nothing where the system does not tell.
pub fn warning(file: &Path) -> Option<String> {
    let mounts = std::fs::read_to_string("/proc/self/mounts").ok()?;
    warning_of(&mounts, file)
}

fn warning_of(mounts: &str, file: &Path) -> Option<String> {
    let kind = kind(mounts, file)?;
    let file = file.display();
    if REMOTE.contains(&kind) {
        return Some(format!(
            "{file} is on a network file system ({kind}), which can lose or damage a SQLite file; \
             put it on a local disk, or use PostgreSQL"
        ));
    }
    PASSING.contains(&kind).then(|| {
        format!(
            "{file} is on {kind}, which ends with the machine or the container, and every decision \
             with it; put it on a disk or a volume"
        )
    })
}

/// The kind of the file system that the file is on: the innermost mount, and of several on one
/// place the last.
fn kind<'m>(mounts: &'m str, file: &Path) -> Option<&'m str> {
    let holds = |line: &'m str| {
        let mut fields = line.split(' ').skip(1);
        let place = PathBuf::from(fields.next()?.replace(r"\040", " "));
        let kind = fields.next()?;
        file.starts_with(&place)
            .then(|| (place.components().count(), kind))
    };
    let (_, kind) = mounts
        .lines()
        .filter_map(holds)
        .max_by_key(|(depth, _)| *depth)?;
    Some(kind)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
overlay / overlay rw,lowerdir=/a b 0 0
proc /proc proc rw 0 0
/dev/vda1 /data ext4 rw 0 0
server:/x /data/shared nfs4 rw 0 0
/dev/vdb /data/two\\040words ext4 rw 0 0
tmpfs /data/mem tmpfs rw 0 0
/dev/vdc /data/mem ext4 rw 0 0
";

    #[test]
    fn a_place_that_does_not_keep_is_warned_of() {
        for (file, word) in [
            ("/data/store.db", None),
            ("/data/two words/store.db", None),
            ("/data/mem/store.db", None),
            ("/data/shared/store.db", Some("nfs4")),
            ("/database/store.db", Some("overlay")),
            ("/store.db", Some("overlay")),
        ] {
            let warning = warning_of(MOUNTS, Path::new(file));
            assert_eq!(warning.is_some(), word.is_some(), "{warning:?}");
            assert!(warning.is_none_or(|text| text.contains(word.unwrap_or_default())));
        }
        assert_eq!(warning_of("", Path::new("/store.db")), None);
        assert_eq!(warning_of("strange\n\n", Path::new("/store.db")), None);
    }
}
