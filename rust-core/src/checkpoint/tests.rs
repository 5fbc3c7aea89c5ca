//! Saves and loads between any two layouts, bitwise; damaged files are detected and named.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::error::Result;

mod destroys_nothing;

static NEXT: AtomicU64 = AtomicU64::new(1);

/// A temporary folder that is removed with its test.
struct TestFolder(PathBuf);

impl TestFolder {
    fn new() -> Self {
        let name = format!("smd-checkpoint-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for TestFolder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A tensor whose bytes encode their position.
#[derive(Clone, Debug)]
struct TestTensor {
    name: String,
    dtype: StoredDType,
    shape: Vec<u64>,
    bytes: Vec<u8>,
}

fn tensor(name: &str, dtype: &str, shape: &[u64]) -> TestTensor {
    let dtype = StoredDType::named(dtype).unwrap();
    let count = shape.iter().product::<u64>() * dtype.bytes();
    let seed = crc32fast::hash(name.as_bytes()) as u64;
    let bytes = (0..count).map(|at| ((at * 2_654_435_761 + seed) >> 7) as u8).collect();
    TestTensor { name: name.into(), dtype, shape: shape.to_vec(), bytes }
}

impl TestTensor {
    /// The bytes of a slice, computed element by element as the reference.
    fn cut(&self, slice: &Slice) -> Vec<u8> {
        let size = self.dtype.bytes();
        let mut out = Vec::new();
        for at in 0..slice.elems().unwrap() {
            let (mut rest, mut place, mut stride) = (at, 0, 1);
            for dimension in (0..self.shape.len()).rev() {
                place += (slice.start[dimension] + rest % slice.shape[dimension]) * stride;
                rest /= slice.shape[dimension];
                stride *= self.shape[dimension];
            }
            out.extend_from_slice(&self.bytes[(place * size) as usize..((place + 1) * size) as usize]);
        }
        out
    }
}

/// The slices of a rank with their bytes.
type HeldSlices = Vec<(TestTensor, Slice, Vec<u8>)>;

fn held(parts: &[(&TestTensor, Slice)]) -> HeldSlices {
    parts.iter().map(|(tensor, slice)| ((*tensor).clone(), slice.clone(), tensor.cut(slice))).collect()
}

fn whole(tensors: &[TestTensor]) -> HeldSlices {
    held(&tensors.iter().map(|tensor| (tensor, Slice::whole(&tensor.shape))).collect::<Vec<_>>())
}

fn options(folder: &Path, rank: usize, world: usize) -> SaveOptions {
    SaveOptions {
        directory: folder.to_owned(),
        rank,
        world,
        threads: 2,
        durable: false,
        keep: None,
        timeout: Duration::from_secs(20),
        exchange: true,
        watch: || Ok(()),
    }
}

fn job(held: &HeldSlices) -> RankSave {
    let source = |(tensor, slice, bytes): &(TestTensor, Slice, Vec<u8>)| SourceSlice {
        name: tensor.name.clone(),
        dtype: tensor.dtype,
        shape: tensor.shape.clone(),
        slice: slice.clone(),
        address: bytes.as_ptr(),
        held: false,
    };
    RankSave { sources: held.iter().map(source).collect(), owner: None }
}

fn save_one(saver: &Saver, tag: &str, step: u64, attempt: u64, held: &HeldSlices, asynchronous: bool) -> Result<()> {
    // SAFETY: the vectors live until the call returns.
    unsafe { saver.save(tag, step, attempt, "layout".into(), step.into(), job(held), asynchronous, &mut || Ok(())) }
}

/// Saves on all ranks, one thread each.
fn save(folder: &Path, tag: &str, step: u64, ranks: &[HeldSlices]) -> Result<()> {
    let attempt = NEXT.fetch_add(1, Ordering::Relaxed);
    let results: Vec<Result<()>> = std::thread::scope(|scope| {
        let threads: Vec<_> = ranks
            .iter()
            .enumerate()
            .map(|(rank, held)| {
                let saver = Saver::new(options(folder, rank, ranks.len()));
                scope.spawn(move || save_one(&saver, tag, step, attempt, held, false))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    results.into_iter().collect()
}

/// The names in a folder, also hidden ones.
fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn read(checkpoint: &Checkpoint, tensor: &TestTensor, slice: &Slice) -> Result<Vec<u8>> {
    let bytes = slice.elems().unwrap() * tensor.dtype.bytes();
    let mut memory = vec![0; bytes as usize];
    let target = Target { name: tensor.name.clone(), slice: slice.clone(), address: memory.as_mut_ptr(), bytes };
    // SAFETY: the vector has as many bytes.
    unsafe { checkpoint.read(&[target], 2)? };
    Ok(memory)
}

fn check(folder: &Path, tag: Option<&str>, tensors: &[TestTensor]) {
    let checkpoint = Checkpoint::open(folder, tag).unwrap();
    checkpoint.verify(2).unwrap();
    assert_eq!(checkpoint.manifest().tensors.len(), tensors.len());
    for tensor in tensors {
        let found = read(&checkpoint, tensor, &Slice::whole(&tensor.shape)).unwrap();
        assert!(found == tensor.bytes, "tensor `{}` is not as it was saved", tensor.name);
    }
}

fn model() -> Vec<TestTensor> {
    vec![
        tensor("bias", "BF16", &[7]),
        // More than two chunks.
        tensor("embedding", "F32", &[2500, 1000]),
        tensor("empty", "F32", &[0, 3]),
        tensor("mask", "BOOL", &[3, 5]),
        tensor("step", "I64", &[]),
        tensor("weight", "F16", &[64, 33, 5]),
    ]
}

/// `parts` slices along a dimension.
fn split(tensor: &TestTensor, dimension: usize, parts: u64) -> Vec<Slice> {
    let mut all = Vec::new();
    for part in 0..parts {
        let mut slice = Slice::whole(&tensor.shape);
        let (from, to) = (part * tensor.shape[dimension] / parts, (part + 1) * tensor.shape[dimension] / parts);
        (slice.start[dimension], slice.shape[dimension]) = (from, to - from);
        all.push(slice);
    }
    all
}

#[test]
fn layouts_load_into_each_other() {
    let folder = TestFolder::new();
    let tensors = model();
    let large = &tensors[1];
    // One rank; two with half of the tensors each; three with a third of the columns of the largest.
    let others: Vec<TestTensor> = tensors.iter().filter(|tensor| tensor.name != "embedding").cloned().collect();
    let columns = split(large, 1, 3);
    let mut sharded: Vec<HeldSlices> = columns.iter().map(|slice| held(&[(large, slice.clone())])).collect();
    sharded[1].extend(whole(&others));
    for (step, ranks) in
        [vec![whole(&tensors)], vec![whole(&tensors[..2]), whole(&tensors[2..])], sharded].iter().enumerate()
    {
        save(&folder.0, &format!("step-{step}"), step as u64, ranks).unwrap();
        check(&folder.0, None, &tensors);
        let checkpoint = Checkpoint::open(&folder.0, None).unwrap();
        assert_eq!((checkpoint.manifest().step, checkpoint.manifest().world), (step as u64, ranks.len()));
        for (dimension, parts) in [(0, 4), (1, 7)] {
            for slice in split(large, dimension, parts) {
                assert!(read(&checkpoint, large, &slice).unwrap() == large.cut(&slice), "{slice:?}");
            }
        }
    }
    assert_eq!(list(&folder.0, CheckpointKind::Sharded).unwrap().len(), 3);
}

#[test]
fn a_whole_model_is_one_safetensors_file() {
    let folder = TestFolder::new();
    let tensors = model();
    let large = &tensors[1];
    let rows = split(large, 0, 2);
    save(&folder.0, "a", 1, &[held(&[(large, rows[0].clone())]), held(&[(large, rows[1].clone())])]).unwrap();
    let out = folder.0.join("merged.safetensors");
    assert_eq!(merge(&Checkpoint::open(&folder.0, None).unwrap(), "embed", &out, 2).unwrap(), 1);
    let bytes = fs::read(&out).unwrap();
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let table: serde_json::Value = serde_json::from_slice(&bytes[8..header]).unwrap();
    assert_eq!(
        table["ding"],
        serde_json::json!({"dtype": "F32", "shape": [2500, 1000], "data_offsets": [0, 10_000_000]})
    );
    assert!(bytes[header..] == large.bytes);
    let error = merge(&Checkpoint::open(&folder.0, None).unwrap(), "x", &out, 2).unwrap_err().to_string();
    assert_eq!(error, "checkpoint `a` has no tensor whose name begins with `x`");
}

#[test]
fn damage_is_found_and_named_and_the_previous_checkpoint_stays() {
    let tensors = model();
    type Damage<'a> = &'a dyn Fn(&Path);
    let damage: [(&str, Damage<'_>, &str); 5] = [
        (
            "a flipped bit",
            &|file| {
                let mut bytes = fs::read(file).unwrap();
                let at = bytes.len() - 3;
                bytes[at] ^= 4;
                fs::write(file, bytes).unwrap();
            },
            "in tensor `",
        ),
        (
            "an altered header",
            &|file| {
                let mut bytes = fs::read(file).unwrap();
                bytes[20] ^= 1;
                fs::write(file, bytes).unwrap();
            },
            "its header was altered",
        ),
        (
            "a short file",
            &|file| {
                let bytes = fs::read(file).unwrap();
                fs::write(file, &bytes[..bytes.len() - 1]).unwrap();
            },
            ", expected ",
        ),
        ("a missing file", &|file| fs::remove_file(file).unwrap(), "No such file"),
        (
            "an altered manifest",
            &|file| {
                let path = file.with_file_name(MANIFEST);
                let text = fs::read_to_string(&path).unwrap().replace("\"step\":2", "\"step\":3");
                fs::write(path, text).unwrap();
            },
            "the manifest has the checksum",
        ),
    ];
    for (what, harm, words) in damage {
        let folder = TestFolder::new();
        save(&folder.0, "one", 1, &[whole(&tensors)]).unwrap();
        save(&folder.0, "two", 2, &[whole(&tensors)]).unwrap();
        let name = "rank-00000-1.safetensors";
        harm(&folder.0.join("two").join(name));
        let found = Checkpoint::open(&folder.0, Some("two")).and_then(|checkpoint| checkpoint.verify(2));
        let text = found.expect_err(what).text();
        let file = if what == "an altered manifest" { MANIFEST } else { name };
        assert!(text.contains(words) && text.contains(&format!("two/{file}")), "{what}: {text}");
        check(&folder.0, Some("one"), &tensors);
    }
}

#[test]
fn loading_finds_a_flipped_bit_in_what_it_reads() {
    let folder = TestFolder::new();
    let tensors = model();
    save(&folder.0, "one", 1, &[whole(&tensors)]).unwrap();
    let checkpoint = Checkpoint::open(&folder.0, None).unwrap();
    let large = &tensors[1];
    let piece = &checkpoint.manifest().tensor("embedding").unwrap().pieces[0];
    let path = folder.0.join("one").join(&checkpoint.manifest().files[piece.file].name);
    let mut bytes = fs::read(&path).unwrap();
    bytes[(piece.offset + CHUNK_BYTES + 17) as usize] ^= 1;
    fs::write(&path, bytes).unwrap();
    // The first rows are in another chunk.
    let rows = split(large, 0, 10);
    assert!(read(&checkpoint, large, &rows[0]).unwrap() == large.cut(&rows[0]));
    let text = read(&checkpoint, large, &rows[6]).unwrap_err().text();
    assert!(text.contains("in tensor `embedding`, have the checksum"), "{text}");
}

#[test]
fn a_broken_attempt_leaves_what_was_there() {
    let folder = TestFolder::new();
    let tensors = model();
    save(&folder.0, "one", 1, &[whole(&tensors)]).unwrap();
    // Rank 1 of 2 never comes.
    let saver = Saver::new(SaveOptions { timeout: Duration::from_millis(50), ..options(&folder.0, 0, 2) });
    let error = save_one(&saver, "one", 2, 77, &whole(&tensors[..1]), false).unwrap_err();
    assert!(
        error.text().contains("saving checkpoint `one` timed out") && error.text().contains("[1]"),
        "{}",
        error.text()
    );
    check(&folder.0, None, &tensors);
    // The late rank gets the reason.
    let late = Saver::new(options(&folder.0, 1, 2));
    let error = save_one(&late, "one", 2, 77, &whole(&tensors[1..]), false).unwrap_err();
    assert!(error.text().contains("rank 0: saving checkpoint `one` timed out"), "{}", error.text());
    clean(&folder.0).unwrap();
    assert_eq!(fs::read_dir(&folder.0).unwrap().count(), 2);
    // The tag can be used again, and an interrupted wait ends.
    let mut stop = || Err(crate::Error::Interrupted { during: "a test".into() });
    let held = whole(&tensors);
    // SAFETY: the vectors live until the call returns.
    let stopped = unsafe { saver.save("one", 3, 78, "".into(), "".into(), job(&held), false, &mut stop) };
    assert_eq!(stopped.unwrap_err().code(), crate::error::Code::Interrupted);
    save(&folder.0, "one", 4, &[whole(&tensors)]).unwrap();
    assert_eq!(Checkpoint::open(&folder.0, None).unwrap().manifest().step, 4);
}

#[test]
fn a_running_attempt_is_not_removed() {
    let folder = TestFolder::new();
    let tensors = model();
    let hidden = folder.0.join(format!(".one.{:016x}.smd-attempt", 5));
    let leftover = folder.0.join(format!(".two.{:016x}.smd-attempt", 6));
    fs::create_dir(&leftover).unwrap();
    fs::write(leftover.join("rank-00003.status"), "").unwrap();
    // An attempt whose rank 0 may be about to write its status file.
    let begun = folder.0.join(format!(".two.{:016x}.smd-attempt", 7));
    fs::create_dir(&begun).unwrap();
    std::thread::scope(|scope| {
        let saver = Saver::new(options(&folder.0, 0, 2));
        let held = whole(&tensors[..1]);
        let first = scope.spawn(move || save_one(&saver, "one", 1, 5, &held, false));
        while !hidden.join("rank-00000.json").exists() {
            std::thread::sleep(Duration::from_millis(1));
        }
        clean(&folder.0).unwrap();
        assert!(hidden.exists() && begun.exists() && !leftover.exists());
        let late = Saver::new(options(&folder.0, 1, 2));
        save_one(&late, "one", 1, 5, &whole(&tensors[1..]), false).unwrap();
        first.join().unwrap().unwrap();
    });
    check(&folder.0, None, &tensors);
}

#[test]
fn an_error_of_rank_0_about_the_newest_checkpoint_reaches_all_ranks() {
    let folder = TestFolder::new();
    let tensors = model();
    let parts = [whole(&tensors[..1]), whole(&tensors[1..])];
    let savers =
        [0, 1].map(|rank| Saver::new(SaveOptions { timeout: Duration::from_secs(600), ..options(&folder.0, rank, 2) }));
    savers.iter().for_each(|saver| saver.open("one", 9, &mut || Ok(())).unwrap());
    // A folder at the path of the file, which therefore cannot be replaced.
    fs::create_dir_all(folder.0.join("newest/old")).unwrap();
    let saving = |rank: usize| save_one(&savers[rank], "one", 1, 9, &parts[rank], false).unwrap_err().text();
    let (first, second) = std::thread::scope(|scope| {
        let second = scope.spawn(|| saving(1));
        (saving(0), second.join().unwrap())
    });
    assert!(first.contains("does not hold the name of a checkpoint"), "{first}");
    assert!(second.contains(&format!("rank 0: {first}")), "{first}; {second}");
    savers.iter().for_each(|saver| saver.discard().unwrap());
    assert_eq!(names(&folder.0), ["newest"]);
}

#[test]
fn asynchronous_saves_hold_what_was_there_at_the_call() {
    let folder = TestFolder::new();
    let tensors = model();
    let saver = Saver::new(SaveOptions { keep: Some(2), durable: true, ..options(&folder.0, 0, 1) });
    for step in 1..=5 {
        let mut memory = whole(&tensors);
        save_one(&saver, &format!("step-{step}"), step, step, &memory, true).unwrap();
        memory.iter_mut().for_each(|(_, _, bytes)| bytes.fill(0xee));
    }
    saver.wait(&mut || Ok(())).unwrap();
    assert!(!saver.is_busy());
    check(&folder.0, None, &tensors);
    let names: Vec<String> =
        list(&folder.0, CheckpointKind::Sharded).unwrap().into_iter().map(|(_, tag)| tag).collect();
    assert_eq!(names, ["step-4", "step-5"]);
    // An error of the background save is returned by the next call.
    save_one(
        &saver,
        "newer",
        6,
        6,
        &held(&[(&tensors[0], Slice::whole(&[7])), (&tensors[0], Slice::whole(&[7]))]),
        true,
    )
    .unwrap();
    let error = saver.wait(&mut || Ok(())).unwrap_err();
    assert!(error.text().contains("tensor `bias` is saved twice by one rank"), "{}", error.text());
}

#[test]
fn ranks_that_disagree_are_told() {
    let folder = TestFolder::new();
    let (one, other) = (tensor("a", "F32", &[4]), tensor("a", "F32", &[5]));
    let text = save(&folder.0, "x", 1, &[whole(std::slice::from_ref(&one)), whole(&[other])]).unwrap_err().text();
    assert!(text.contains("tensor `a` is F32 [4] on one rank and F32 [5] on another"), "{text}");
    let text = save(&folder.0, "x", 1, &[whole(std::slice::from_ref(&one)), whole(std::slice::from_ref(&one))])
        .unwrap_err()
        .text();
    assert!(text.contains("tensor `a`: its pieces have 8 elements, expected 4"), "{text}");
    assert_eq!(newest(&folder.0).unwrap(), None);
    assert!(Checkpoint::open(&folder.0, Some("../x")).is_err());
}

#[test]
fn a_lost_note_of_the_newest_is_made_up_for() {
    let folder = TestFolder::new();
    let tensors = model();
    save(&folder.0, "b", 1, &[whole(&tensors)]).unwrap();
    save(&folder.0, "a", 2, &[whole(&tensors)]).unwrap();
    assert_eq!(newest(&folder.0).unwrap().unwrap(), "a");
    fs::write(folder.0.join("newest"), "../../etc").unwrap();
    assert_eq!(newest(&folder.0).unwrap().unwrap(), "a");
    fs::remove_file(folder.0.join("newest")).unwrap();
    assert_eq!(newest(&folder.0).unwrap().unwrap(), "a");
}

#[test]
fn manifests_are_read_with_care() {
    let folder = TestFolder::new();
    save(&folder.0, "a", 1, &[whole(&model())]).unwrap();
    let good = Checkpoint::open(&folder.0, None).unwrap().manifest().clone();
    assert_eq!(Manifest::parse(good.to_text().as_bytes()).unwrap(), good);
    let refused = |change: &dyn Fn(&mut Manifest)| {
        let mut manifest = good.clone();
        change(&mut manifest);
        Manifest::parse(manifest.to_text().as_bytes()).unwrap_err().to_string()
    };
    let embedding = good.tensors.iter().position(|tensor| tensor.name == "embedding").unwrap();
    type Change<'a> = &'a dyn Fn(&mut Manifest);
    let cases: [(Change<'_>, &str); 9] = [
        (&|m| m.format = "2".into(), "the checkpoint's format is `2`"),
        (&|m| m.files[0].name = "../passwd".into(), "`../passwd` is not a valid name"),
        (&|m| m.files[1].name = m.files[0].name.clone(), "or is listed twice"),
        (&|m| m.tensors.swap(0, 1), "not sorted by name"),
        (&|m| m.tensors[embedding].pieces[0].file = 9, "there is no file 9"),
        (&|m| m.tensors[embedding].pieces[0].offset = u64::MAX - 7, "are not inside"),
        (&|m| m.tensors[embedding].pieces[0].slice.start[0] = u64::MAX, "is not inside of shape"),
        (&|m| m.tensors[embedding].shape = vec![u64::MAX, 1000], "is too large for any memory"),
        (&|m| m.tensors[embedding].pieces[0].crc.truncate(1), "checksums for 10000000 bytes"),
    ];
    for (change, words) in cases {
        let text = refused(change);
        assert!(text.contains(words), "{text}");
    }
    let twice = refused(&|m| {
        let tensor = &mut m.tensors[embedding];
        let mut piece = tensor.pieces[0].clone();
        piece.slice.shape[0] = 1250;
        piece.crc.truncate(2);
        tensor.pieces = vec![piece.clone(), piece];
    });
    assert!(twice.contains("two pieces have the same elements"), "{twice}");
    for text in ["", "{}", "[]", "{\"crc\":1,\"manifest\":{}}"] {
        assert!(Manifest::parse(text.as_bytes()).is_err());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn runs_copy_what_slices_have_in_common(
        boxes in prop::collection::vec((1_u64..6, (0_u64..6, 1_u64..6), (0_u64..6, 1_u64..6)), 0..4)
    ) {
        let shape: Vec<u64> = boxes.iter().map(|(length, ..)| *length).collect();
        type SliceRow = (u64, (u64, u64), (u64, u64));
        let part = |of: fn(&SliceRow) -> (u64, u64)| {
            let (mut start, mut lengths) = (Vec::new(), Vec::new());
            for (at, length) in shape.iter().enumerate() {
                let (from, count) = of(&boxes[at]);
                start.push(from % length);
                lengths.push(1 + (count - 1) % (length - from % length));
            }
            Slice { start, shape: lengths }
        };
        let (piece, target) = (part(|row| row.1), part(|row| row.2));
        let all = tensor("t", "I16", &shape);
        let (from, wanted) = (all.cut(&piece), all.cut(&target));
        let mut copied = vec![None; wanted.len()];
        for run in piece.runs(&target, 2) {
            for at in 0..run.bytes {
                prop_assert!(copied[(run.to + at) as usize].replace(from[(run.from + at) as usize]).is_none());
            }
        }
        let common = piece.intersection(&target).map_or(0, |slice| slice.elems().unwrap() * 2);
        prop_assert_eq!(copied.iter().flatten().count() as u64, common);
        prop_assert!(copied.iter().zip(&wanted).all(|(got, want)| got.is_none_or(|got| got == *want)));
    }
}
