//! Saves replace and remove only what saves wrote (CKPT-6), move back what an interrupted one had moved (CKPT-7),
//! and leave no temporary files.

use std::collections::BTreeMap;
use std::os::unix::fs::symlink;

use super::*;
use crate::checkpoint::staging::Staging;
use crate::error::Code;

/// Every file below a folder with its bytes, every folder and every link.
fn snapshot(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut all = BTreeMap::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let found = path.symlink_metadata().unwrap();
        if found.is_dir() {
            all.insert(path.clone(), b"a folder".to_vec());
            all.extend(snapshot(&path));
        } else if found.is_symlink() {
            all.insert(path.clone(), fs::read_link(&path).unwrap().into_os_string().into_encoded_bytes());
        } else {
            all.insert(path.clone(), fs::read(&path).unwrap());
        }
    }
    all
}

fn setting(folder: &Path, tag: &str, kind: CheckpointKind, number: u64) -> SaveSpec {
    SaveSpec {
        directory: folder.to_owned(),
        tag: tag.into(),
        kind,
        number,
        rank: 0,
        world: 1,
        durable: true,
        exchange: true,
    }
}

fn open(folder: &Path, tag: &str, kind: CheckpointKind) -> Result<SaveAttempt> {
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    SaveAttempt::open(setting(folder, tag, kind, number), Duration::from_secs(1), &mut || Ok(()))
}

/// The bytes of an empty zip archive, with which a `torch.save` file ends.
fn archive(content: &str) -> Vec<u8> {
    let mut bytes = content.as_bytes().to_vec();
    bytes.extend_from_slice(b"PK\x05\x06");
    bytes.extend_from_slice(&[0; 18]);
    bytes
}

fn save_full(folder: &Path, tag: &str, model: &str, content: Option<&str>) -> Result<()> {
    let attempt = open(folder, tag, CheckpointKind::Full)?;
    fs::write(attempt.data().join("model"), archive(model)).unwrap();
    if let Some(content) = content {
        fs::write(attempt.data().join("user_content"), archive(content)).unwrap();
    }
    attempt.commit(None, None)?;
    attempt.leave();
    Ok(())
}

fn save_partial(folder: &Path, tag: &str, text: &str, keep: Option<usize>) -> Result<()> {
    let attempt = open(folder, tag, CheckpointKind::Partial)?;
    fs::write(attempt.data().join("model_0_0.pt"), text).unwrap();
    attempt.report_files(&["model_0_0.pt".into()])?;
    attempt.commit(None, keep)?;
    attempt.leave();
    Ok(())
}

#[test]
fn only_a_checkpoint_of_the_same_kind_is_replaced() {
    type MakeForeign<'a> = &'a dyn Fn(&Path, &Path);
    let tensors = model();
    let plants: [(&str, MakeForeign<'_>); 9] = [
        ("is a folder without a `manifest.json`", &|_, place| {
            fs::create_dir_all(place.join("photos")).unwrap();
            fs::write(place.join("photos/one.jpg"), "a photo").unwrap();
        }),
        ("is a folder without a `manifest.json`", &|_, place| fs::create_dir(place).unwrap()),
        ("is a file", &|_, place| fs::write(place, "a text").unwrap()),
        ("is a symbolic link", &|folder, place| {
            fs::create_dir(folder.join("elsewhere")).unwrap();
            symlink("elsewhere", place).unwrap();
        }),
        ("is a symbolic link", &|_, place| symlink("nowhere", place).unwrap()),
        ("is a partial checkpoint", &|folder, _| save_partial(folder, "mine", "parts", None).unwrap()),
        ("is a file", &|folder, _| save_full(folder, "mine", "all", Some("more")).unwrap()),
        ("holds `notes.txt`", &|folder, place| {
            save(folder, "mine", 1, &[whole(&tensors[..1])]).unwrap();
            fs::write(place.join("notes.txt"), "by hand").unwrap();
        }),
        ("has a damaged `manifest.json`", &|folder, place| {
            save(folder, "mine", 1, &[whole(&tensors[..1])]).unwrap();
            fs::write(place.join(MANIFEST), "{}").unwrap();
        }),
    ];
    for (words, plant) in plants {
        let folder = TestFolder::new();
        plant(&folder.0, &folder.0.join("mine"));
        fs::write(folder.0.join("other.txt"), "beside it").unwrap();
        let before = snapshot(&folder.0);
        let text = save(&folder.0, "mine", 2, &[whole(&tensors)]).expect_err(words).text();
        assert!(text.contains(words) && text.contains("/mine`"), "{words}: {text}");
        assert_eq!(snapshot(&folder.0), before, "{words}");
    }
    for kind in [CheckpointKind::Partial, CheckpointKind::Full] {
        let folder = TestFolder::new();
        save(&folder.0, "mine", 1, &[whole(&tensors[..1])]).unwrap();
        fs::write(folder.0.join("text"), "a text").unwrap();
        fs::write(folder.0.join("user_content_new"), "a text").unwrap();
        let before = snapshot(&folder.0);
        assert!(open(&folder.0, "mine", kind).is_err());
        assert!(open(&folder.0, "text", kind).is_err());
        assert_eq!(open(&folder.0, "new", kind).is_ok(), kind == CheckpointKind::Partial);
        if kind == CheckpointKind::Full {
            assert_eq!(snapshot(&folder.0), before);
        }
    }
}

#[test]
fn a_name_that_leads_out_of_the_folder_or_is_taken_is_refused() {
    let folder = TestFolder::new();
    let inner = folder.0.join("inner");
    for tag in ["", ".", "..", "../evil", "/tmp/evil", "a/b", ".hidden", "newest", "a\0b", &"x".repeat(201)] {
        for kind in [CheckpointKind::Sharded, CheckpointKind::Partial, CheckpointKind::Full] {
            let error = open(&inner, tag, kind).expect_err(tag);
            assert_eq!(error.code(), Code::InvalidArgument, "{tag:?}");
        }
        assert!(Checkpoint::open(&inner, Some(tag)).is_err());
    }
    assert!(names(&folder.0).is_empty());
    let deep = inner.join("not/yet/there");
    save(&deep, &"x".repeat(200), 1, &[whole(&model()[..1])]).unwrap();
    fs::write(folder.0.join("file"), "").unwrap();
    assert!(
        open(&folder.0.join("file"), "a", CheckpointKind::Sharded)
            .unwrap_err()
            .text()
            .contains("is a file: expected a folder")
    );
}

#[test]
fn without_an_exchange_of_names_checkpoints_are_replaced_as_well() {
    let folder = TestFolder::new();
    let (tensors, number) = (model(), 40);
    let saver = Saver::new(SaveOptions { exchange: false, durable: true, keep: Some(2), ..options(&folder.0, 0, 1) });
    for step in 1..=3 {
        save_one(&saver, "again", step, number + step, &whole(&tensors), false).unwrap();
        check(&folder.0, None, &tensors);
        assert_eq!(names(&folder.0), ["again", "newest"]);
    }
    // Killed between the two renames: the previous checkpoint is found and moved back.
    let attempt = folder.0.join(format!(".again.{:016x}.smd-attempt", 99));
    fs::create_dir_all(attempt.join("old")).unwrap();
    fs::write(attempt.join("rank-00000.status"), "").unwrap();
    fs::rename(folder.0.join("again"), attempt.join("old/again")).unwrap();
    assert_eq!(newest(&folder.0).unwrap().unwrap(), "again");
    check(&folder.0, None, &tensors);
    clean(&folder.0).unwrap();
    assert_eq!(names(&folder.0), ["again", "newest"]);
    check(&folder.0, Some("again"), &tensors);
    // Another file has taken the name meanwhile: both stay.
    fs::create_dir_all(attempt.join("old")).unwrap();
    fs::write(attempt.join("rank-00000.status"), "").unwrap();
    fs::rename(folder.0.join("again"), attempt.join("old/again")).unwrap();
    fs::create_dir(folder.0.join("again")).unwrap();
    fs::write(folder.0.join("again/photo"), "a photo").unwrap();
    clean(&folder.0).unwrap();
    assert_eq!(fs::read(folder.0.join("again/photo")).unwrap(), b"a photo");
    check(&folder.0, Some("again"), &tensors);
}

#[test]
fn the_content_of_a_full_checkpoint_is_that_of_its_model() {
    let folder = TestFolder::new();
    save_full(&folder.0, "t", "one", Some("content of one")).unwrap();
    let content = || content_of(&folder.0, "t").map(|path| fs::read(path).unwrap());
    let begins = |text: &str| content().is_some_and(|bytes| bytes.starts_with(text.as_bytes()));
    assert!(begins("content of one"));
    // Killed after each of the renames of the second checkpoint.
    for steps in 0..3 {
        let attempt = open(&folder.0, "t", CheckpointKind::Full).unwrap();
        let (number, hidden) = (attempt.setting().number, attempt.folder().to_owned());
        let data = attempt.data();
        for (name, role) in [("model", mark::FileRole::Model), ("user_content", mark::FileRole::UserContent)] {
            fs::write(data.join(name), archive("two")).unwrap();
            mark::Mark::put(&data.join(name), role, number, false).unwrap();
        }
        fs::create_dir(hidden.join("old")).unwrap();
        let moves = [
            (folder.0.join("user_content_t"), hidden.join("old/user_content_t")),
            (data.join("user_content"), folder.0.join("user_content_t")),
        ];
        moves.iter().take(steps).for_each(|(from, to)| fs::rename(from, to).unwrap());
        drop(attempt);
        assert!(begins("content of one"), "{steps}");
        clean(&folder.0).unwrap();
        assert_eq!(names(&folder.0), ["t", "user_content_t"], "{steps}");
        assert!(begins("content of one"), "{steps}");
    }
    save_full(&folder.0, "t", "three", Some("content of three")).unwrap();
    assert!(begins("content of three"));
    save_full(&folder.0, "t", "four", None).unwrap();
    assert_eq!((content(), names(&folder.0)), (None, vec!["t".to_owned()]));
    // A flipped bit is detected.
    verify_file(&folder.0.join("t")).unwrap();
    let mut bytes = fs::read(folder.0.join("t")).unwrap();
    bytes[1] ^= 1;
    fs::write(folder.0.join("t"), bytes).unwrap();
    assert!(verify_file(&folder.0.join("t")).unwrap_err().text().contains("has the checksum"));
}

#[test]
fn partial_checkpoints_are_kept_by_their_order_and_checked() {
    let folder = TestFolder::new();
    for tag in ["a_partial", "c_partial", "b_partial", "a_partial"] {
        save_partial(&folder.0, tag, tag, Some(2)).unwrap();
    }
    assert_eq!(names(&folder.0), ["a_partial", "b_partial", "newest"]);
    assert_eq!(fs::read_to_string(folder.0.join("newest")).unwrap(), "a_partial");
    assert_eq!(newest(&folder.0).unwrap(), None, "it is of another kind");
    // A folder with a file that no save wrote stays complete.
    fs::write(folder.0.join("b_partial/notes.txt"), "by hand").unwrap();
    for tag in ["d_partial", "e_partial", "f_partial"] {
        save_partial(&folder.0, tag, tag, Some(2)).unwrap();
    }
    assert_eq!(names(&folder.0), ["b_partial", "e_partial", "f_partial", "newest"]);
    assert_eq!(names(&folder.0.join("b_partial")), ["manifest.json", "model_0_0.pt", "notes.txt"]);
    let checkpoint = Checkpoint::open(&folder.0, Some("e_partial")).unwrap();
    checkpoint.verify(1).unwrap();
    fs::write(folder.0.join("e_partial/model_0_0.pt"), "E_partial").unwrap();
    let error = checkpoint.check_files(&["model_0_0.pt".into()]).unwrap_err().text();
    assert!(error.contains("e_partial/model_0_0.pt` is damaged"), "{error}");
}

#[test]
fn only_names_that_saves_give_are_removed() {
    let folder = TestFolder::new();
    let attempt = folder.0.join(format!(".one.{:016x}.smd-attempt", 5));
    fs::create_dir_all(attempt.join("data/mine")).unwrap();
    for name in ["rank-00000.status", "data/rank-00000-0.safetensors", "data/notes.txt", "data/mine/photo"] {
        fs::write(attempt.join(name), "").unwrap();
    }
    for name in [".one.0123456789abcdef", ".cache", ".x.123.smd-attempt"] {
        fs::create_dir(folder.0.join(name)).unwrap();
    }
    let mut expected = snapshot(&folder.0);
    clean(&folder.0).unwrap();
    for name in ["rank-00000.status", "data/rank-00000-0.safetensors"] {
        expected.remove(&attempt.join(name));
    }
    assert_eq!(snapshot(&folder.0), expected);
}

#[test]
fn a_failing_rank_removes_its_files_and_reports_at_once() {
    let folder = TestFolder::new();
    let tensors = model();
    save(&folder.0, "one", 1, &[whole(&tensors)]).unwrap();
    let before = snapshot(&folder.0);
    let good = whole(&tensors);
    // Rank 1 has the same tensor twice.
    let bad = held(&[(&tensors[0], Slice::whole(&[7])), (&tensors[0], Slice::whole(&[7]))]);
    let savers: Vec<Saver> = (0..3)
        .map(|rank| Saver::new(SaveOptions { timeout: Duration::from_secs(600), ..options(&folder.0, rank, 3) }))
        .collect();
    for asynchronous in [false, true] {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        savers.iter().for_each(|saver| saver.open("one", number, &mut || Ok(())).unwrap());
        let texts: Vec<String> = std::thread::scope(|scope| {
            let threads: Vec<_> = savers
                .iter()
                .enumerate()
                .map(|(rank, saver)| {
                    let part = if rank == 1 { &bad } else { &good };
                    scope.spawn(move || {
                        let started = save_one(saver, "one", 2, number, part, asynchronous);
                        started.and_then(|()| saver.wait(&mut || Ok(()))).unwrap_err().text()
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let cause = "tensor `bias` is saved twice by one rank";
        assert!(texts[1].contains(cause), "{texts:?}");
        assert!([0, 2].iter().all(|&rank| texts[rank].contains(&format!("rank 1: {}", texts[1]))), "{texts:?}");
        savers.iter().for_each(|saver| saver.discard().unwrap());
        assert_eq!(snapshot(&folder.0), before);
    }
}

#[test]
fn memory_with_an_owner_is_not_copied_a_second_time() {
    struct ForeignFolder(std::sync::mpsc::Sender<()>);
    impl Drop for ForeignFolder {
        fn drop(&mut self) {
            let _ = self.0.send(());
        }
    }
    let folder = TestFolder::new();
    let tensors = model();
    let memory = whole(&tensors);
    let mut mixed = job(&memory);
    mixed.sources.iter_mut().for_each(|source| source.held = true);
    let addresses: Vec<_> = mixed.sources.iter().map(|source| source.address).collect();
    // SAFETY: the vectors live until the end of the test.
    assert_eq!(unsafe { Staging::default().take(&mut mixed.sources, 2) }.unwrap(), 0);
    assert_eq!(mixed.sources.iter().map(|source| source.address).collect::<Vec<_>>(), addresses);
    mixed.sources[0].held = false;
    // SAFETY: as above.
    let copied = unsafe { Staging::default().take(&mut mixed.sources.clone(), 2) }.unwrap();
    assert!((14..=64).contains(&copied), "{copied}");
    let (sender, dropped) = std::sync::mpsc::channel();
    mixed.owner = Some(Box::new(ForeignFolder(sender)));
    let saver = Saver::new(options(&folder.0, 0, 1));
    // SAFETY: as above.
    unsafe { saver.save("a", 1, 1, "".into(), "".into(), mixed, true, &mut || Ok(())) }.unwrap();
    dropped.recv_timeout(Duration::from_secs(20)).unwrap();
    saver.wait(&mut || Ok(())).unwrap();
    check(&folder.0, None, &tensors);
}
