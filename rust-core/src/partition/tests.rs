//! Compares partitions with the best possible ones, found by exhaustive search, and with the published algorithm.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::pipeline::LinkCost;
use crate::pipeline::schedule::Schedule;

/// Builds trees by hand: modules in the order in which they run.
#[derive(Default)]
struct Builder {
    modules: Vec<ModuleCost>,
    values: Vec<Value>,
    tasks: Vec<Tasks>,
    ties: Vec<Vec<usize>>,
    /// The module that ran last, and the bytes of its output.
    last: Option<(usize, u64)>,
}

impl Builder {
    fn container(&mut self, parent: Option<usize>, path: &str) -> usize {
        self.modules.push(ModuleCost { path: path.to_owned(), parent, ..ModuleCost::default() });
        self.modules.len() - 1
    }

    /// Adds a module that uses the output of the previous one and has an output of `out` bytes.
    fn layer(&mut self, parent: usize, path: &str, parameters: u64, activations: u64, time: u64, out: u64) -> usize {
        let index = self.container(Some(parent), path);
        self.modules[index] = ModuleCost {
            parameter_bytes: parameters,
            state_bytes: 3 * parameters,
            activation_bytes: activations,
            time,
            first_run: Some(index as u64),
            ..self.modules[index].clone()
        };
        if let Some((from, bytes)) = self.last.replace((index, out)) {
            self.values.push(Value { from, to: vec![index], bytes });
        }
        index
    }

    fn tree(self) -> CostTree {
        CostTree::new(self.modules, self.values, self.tasks, &self.ties).unwrap()
    }
}

/// A model of an embedding, equal transformer blocks, a norm and an output layer, which shares the embedding if
/// `tied`.
fn transformer(blocks: usize, width: u64, vocabulary: u64, tied: bool, tokens: u64) -> CostTree {
    let mut tree = Builder::default();
    let root = tree.container(None, "");
    let hidden = 2 * tokens * width;
    let body = tree.container(Some(root), "body");
    let embedding = tree.layer(body, "body.embedding", 4 * vocabulary * width, hidden, hidden / 3000, hidden);
    for block in 0..blocks {
        let path = format!("body.{block}");
        let at = tree.container(Some(body), &path);
        let skip = tree.last.expect("the embedding ran").0;
        // Five calls and some small operations; with attention and the additions.
        tree.tasks.extend([(1, 1), (2, 12), (3, 2), (4, 2), (5, 2)].map(|(part, count)| Tasks {
            module: at,
            at: at + part,
            time: count * 15_000,
        }));
        let work = |weights: u64| 6 * tokens * weights / 400_000;
        tree.layer(at, &format!("{path}.norm"), 8 * width, hidden, hidden / 3000, hidden);
        tree.layer(at, &format!("{path}.attention"), 12 * width * width, 3 * hidden, work(3 * width * width), hidden);
        let out = tree.layer(at, &format!("{path}.out"), 4 * width * width, hidden, work(width * width), hidden);
        tree.values.push(Value { from: skip, to: vec![out], bytes: hidden });
        tree.layer(at, &format!("{path}.up"), 16 * width * width, 4 * hidden, work(4 * width * width), 4 * hidden);
        let down = tree.layer(at, &format!("{path}.down"), 16 * width * width, hidden, work(4 * width * width), hidden);
        tree.values.push(Value { from: out, to: vec![down], bytes: hidden });
    }
    tree.layer(body, "body.norm", 8 * width, hidden, hidden / 3000, hidden);
    let own = if tied { 0 } else { 4 * vocabulary * width };
    let head = tree.layer(root, "head", own, 4 * tokens * vocabulary, 6 * tokens * vocabulary * width / 400_000, 0);
    if tied {
        tree.ties.push(vec![embedding, head]);
    }
    tree.tree()
}

/// Encoder and decoder of different depth; every block of the decoder uses the encoder's output.
fn encoder_decoder(encoders: usize, decoders: usize) -> CostTree {
    let mut tree = Builder::default();
    let root = tree.container(None, "");
    let hidden = 1 << 18;
    let shared = tree.layer(root, "shared", 64 << 20, hidden, 50, hidden);
    let encoder = tree.container(Some(root), "encoder");
    for block in 0..encoders {
        let at = tree.container(Some(encoder), &format!("encoder.{block}"));
        tree.layer(at, &format!("encoder.{block}.attention"), 4 << 20, 4 * hidden, 900, hidden);
        tree.layer(at, &format!("encoder.{block}.feed"), 8 << 20, 5 * hidden, 1800, hidden);
    }
    let memory = tree.last.expect("the encoder ran").0;
    let decoder = tree.container(Some(root), "decoder");
    let mut consumers = Vec::new();
    for block in 0..decoders {
        let at = tree.container(Some(decoder), &format!("decoder.{block}"));
        tree.layer(at, &format!("decoder.{block}.attention"), 4 << 20, 4 * hidden, 900, hidden);
        consumers.push(tree.layer(at, &format!("decoder.{block}.cross"), 4 << 20, 4 * hidden, 1000, hidden));
        tree.layer(at, &format!("decoder.{block}.feed"), 8 << 20, 5 * hidden, 1800, hidden);
    }
    tree.values.push(Value { from: memory, to: consumers, bytes: hidden });
    let head = tree.layer(root, "head", 0, 16 * hidden, 2000, 0);
    tree.ties.push(vec![shared, head]);
    tree.tree()
}

/// The first modules have large activations, the last ones many parameters.
fn resnet() -> CostTree {
    let mut tree = Builder::default();
    let root = tree.container(None, "");
    tree.layer(root, "conv1", 9408 * 4, 24 << 20, 2400, 12 << 20);
    tree.layer(root, "bn1", 512, 24 << 20, 600, 3 << 20);
    for (layer, (channels, pixels)) in [(64, 3136), (128, 784), (256, 196), (512, 49_u64)].into_iter().enumerate() {
        let name = format!("layer{}", layer + 1);
        let at = tree.container(Some(root), &name);
        let out = 32 * channels * pixels * 4;
        for block in 0..2 {
            let name = format!("{name}.{block}");
            let at = tree.container(Some(at), &name);
            let skip = tree.last.expect("conv1 ran").0;
            for part in 1..=2 {
                tree.layer(at, &format!("{name}.conv{part}"), 36 * channels * channels, out, 3700, out);
                tree.layer(at, &format!("{name}.bn{part}"), 16 * channels, out, 500, out);
            }
            let last = tree.last.expect("bn2 ran").0;
            tree.values.push(Value { from: skip, to: vec![last], bytes: out });
        }
    }
    tree.layer(root, "fc", 512 * 1000 * 4, 32 * 512 * 4, 120, 0);
    tree.tree()
}

const LINK: LinkCost = LinkCost { latency: 10_000, bytes_per_tick: 200 };

fn objective(partitions: usize, memory_weight: f64) -> Objective {
    Objective::new(memory_weight, kept_microbatches(partitions, 8, None, Schedule::Interleaved), LINK).unwrap()
}

/// The lowest largest cost of all cuts of the line, over all positions of modules that share a parameter.
fn by_trying_all(tree: &CostTree, partitions: usize, objective: &Objective) -> f64 {
    let order = tree.line();
    let mut groups: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    order.iter().for_each(|&module| groups.entry(tree.tied_to(module)).or_default().push(module));
    let mut homes: Vec<BTreeMap<usize, usize>> = vec![BTreeMap::new()];
    for (first, members) in groups {
        homes = members
            .iter()
            .flat_map(|&home| homes.iter().map(move |known| (known, home)))
            .map(|(known, home)| known.iter().map(|(&a, &b)| (a, b)).chain([(first, home)]).collect())
            .collect();
    }
    let mut best = f64::INFINITY;
    for homes in &homes {
        let units: Vec<usize> =
            order.iter().copied().filter(|&module| homes[&tree.tied_to(module)] == module).collect();
        let pieces = partitions.min(units.len());
        let mut cuts: Vec<usize> = (0..pieces).collect();
        loop {
            let place = |unit: usize| cuts.iter().filter(|&&cut| cut <= unit).count() as u32 - 1;
            let at: BTreeMap<usize, u32> =
                units.iter().enumerate().map(|(unit, &module)| (module, place(unit))).collect();
            let assignment =
                tree.spread(|module| homes.get(&tree.tied_to(module)).and_then(|home| at.get(home)).copied());
            best = best.min(largest(tree, &assignment, objective));
            // The next combination of positions of cuts; the first one is always 0.
            let Some(index) = (1..pieces).rev().find(|&index| cuts[index] < units.len() - (pieces - index)) else {
                break;
            };
            cuts[index] += 1;
            for later in index + 1..pieces {
                cuts[later] = cuts[later - 1] + 1;
            }
        }
    }
    best
}

/// Checks PART-2 for the modules of the line.
fn check_contiguous(tree: &CostTree, assignment: &[u32]) {
    let alone = |&module: &usize| {
        (0..assignment.len()).all(|other| other == module || tree.tied_to(other) != tree.tied_to(module))
    };
    let free: Vec<u32> = tree.line().iter().filter(|module| alone(module)).map(|&module| assignment[module]).collect();
    assert!(free.is_sorted(), "{free:?}");
    for module in 0..assignment.len() {
        assert_eq!(assignment[module], assignment[tree.tied_to(module)]);
    }
}

/// The fields of a [`ModuleCost`].
type ModuleRow = (String, Option<usize>, u64, u64, u64, u64, Option<u64>, Option<usize>);

/// A model of `models.json`: real ones, as `cost_trace.py` sees them.
#[derive(serde::Deserialize)]
struct Traced {
    name: String,
    modules: Vec<ModuleRow>,
    values: Vec<(usize, Vec<usize>, u64)>,
    tasks: Vec<(usize, usize, u64)>,
    ties: Vec<Vec<usize>>,
}

fn traced() -> Vec<(String, CostTree)> {
    let models: Vec<Traced> =
        serde_json::from_str(include_str!("models.json")).expect("tests/support/trees.py wrote it");
    let tree = |model: Traced| {
        let module = |(path, parent, parameter_bytes, state_bytes, activation_bytes, time, first_run, follows)| {
            ModuleCost { path, parent, parameter_bytes, state_bytes, activation_bytes, time, first_run, follows }
        };
        let modules = model.modules.into_iter().map(module).collect();
        let values = model.values.into_iter().map(|(from, to, bytes)| Value { from, to, bytes }).collect();
        let tasks = model.tasks.into_iter().map(|(module, at, time)| Tasks { module, at, time });
        (model.name, CostTree::new(modules, values, tasks.collect(), &model.ties).unwrap())
    };
    models.into_iter().map(tree).collect()
}

/// Checks the partition of a tree: it is a cut of the line, or the published partition where that is better.
fn divided(name: &str, tree: &CostTree, partitions: usize, objective: &Objective) -> (Vec<u32>, f64) {
    let found = partition(tree, partitions, objective).unwrap().assignment;
    let ours = largest(tree, &found, objective);
    let published = published::partition(tree, partitions, objective);
    let theirs = largest(tree, &published, objective);
    let used = |assignment: &[u32]| (0..partitions as u32).filter(|index| assignment.contains(index)).count();
    if found != published {
        check_contiguous(tree, &found);
        let empty = used(&published) < used(&found);
        let most = theirs * NEARLY_EQUAL_COST_FACTOR * 1.000_001;
        assert!(empty || ours <= most, "{name}, {partitions}, {objective:?}: {ours} against {theirs}");
    }
    (found, ours)
}

#[test]
fn models_are_balanced_and_no_worse_than_by_the_published_algorithm() {
    let mut models = vec![
        ("gpt".to_owned(), transformer(24, 1024, 50_257, true, 2048)),
        ("gpt of few blocks".to_owned(), transformer(4, 1024, 50_257, true, 2048)),
        ("bert".to_owned(), transformer(12, 768, 30_522, false, 1024)),
        ("t5".to_owned(), encoder_decoder(6, 6)),
        ("t5 with a deep encoder".to_owned(), encoder_decoder(12, 4)),
        ("resnet".to_owned(), resnet()),
    ];
    models.extend(traced());
    assert_eq!(models.len(), 6 + 16);
    for (name, tree) in &models {
        for partitions in [1, 2, 3, 4, 8] {
            for weight in [0.0, 0.2, 0.8, 1.0] {
                let objective = objective(partitions, weight);
                let (_, ours) = divided(name, tree, partitions, &objective);
                if partitions <= 3 {
                    let best = by_trying_all(tree, partitions, &objective);
                    assert!(
                        ours <= EQUAL_COST_FACTOR * 1.000_001 * best,
                        "{name}, {partitions}, {weight}: {ours}, possible is {best}"
                    );
                }
            }
        }
    }
}

#[test]
fn a_division_that_is_no_cut_is_taken_where_it_is_better() {
    let models = traced();
    let (_, tree) = models.iter().find(|(name, _)| name == "in_place").expect("it is one of them");
    let objective = objective(3, 0.8);
    let (found, ours) = divided("in_place", tree, 3, &objective);
    let best_cut = by_trying_all(tree, 3, &objective);
    assert!(ours < 0.95 * best_cut, "{ours} beside {best_cut}");
    let head = tree.modules().iter().position(|module| module.path == "head").expect("it has one");
    assert_eq!(found[head], 0);
}

/// A random tree: each module is below one of the few before it, and values go from earlier modules to later ones.
fn trees() -> impl Strategy<Value = CostTree> {
    let module = (0_usize..4, 0_u64..100, 0_u64..100, 0_u64..100, any::<bool>());
    let value = (any::<prop::sample::Index>(), prop::collection::vec(any::<prop::sample::Index>(), 1..4), 0_u64..3000);
    let tie = prop::collection::vec(any::<prop::sample::Index>(), 2..3);
    let task = (any::<prop::sample::Index>(), 0_usize..3, 0_u64..100);
    (
        prop::collection::vec(module, 1..10),
        prop::collection::vec(value, 0..10),
        prop::collection::vec(task, 0..10),
        prop::collection::vec(tie, 0..2),
    )
        .prop_map(|(modules, values, tasks, ties)| {
            let count = modules.len();
            let modules: Vec<ModuleCost> = modules
                .into_iter()
                .enumerate()
                .map(|(index, (up, parameters, activations, time, runs))| ModuleCost {
                    path: if index == 0 { String::new() } else { format!("m{index}") },
                    parent: index.checked_sub(1).map(|last| last.saturating_sub(up)),
                    parameter_bytes: parameters,
                    state_bytes: 3 * parameters,
                    activation_bytes: activations,
                    time,
                    first_run: runs.then_some((index as u64 * 7) % 11),
                    follows: None,
                })
                .collect();
            let values = values
                .into_iter()
                .map(|(from, to, bytes)| Value {
                    from: from.index(count),
                    to: to.into_iter().map(|to| to.index(count)).collect(),
                    bytes,
                })
                .collect();
            let tasks = tasks
                .into_iter()
                .map(|(at, up, time)| {
                    let at = at.index(count);
                    let above = |&index: &usize| modules[index].parent;
                    let module = std::iter::successors(Some(at), above).take(up + 1).last().expect("itself");
                    Tasks { module, at, time }
                })
                .collect();
            let ties: Vec<Vec<usize>> =
                ties.into_iter().map(|tie| tie.into_iter().map(|index| index.index(count)).collect()).collect();
            CostTree::new(modules, values, tasks, &ties).unwrap()
        })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_trees_are_balanced(tree in trees(), partitions in 1_usize..5, weight in 0.0..1.0_f64) {
        let objective = objective(partitions, weight);
        let (found, ours) = divided("random", &tree, partitions, &objective);
        let best = by_trying_all(&tree, partitions, &objective);
        prop_assert!(ours <= best * EQUAL_COST_FACTOR * (1.0 + 1e-6), "{} where {} is possible", ours, best);
        prop_assert_eq!(&found, &partition(&tree, partitions, &objective).unwrap().assignment);
    }
}

#[test]
fn memory_counts_only_where_it_is_scarce() {
    let tree = transformer(12, 1024, 32_000, false, 2048);
    let objective = Objective::new(0.8, kept_microbatches(2, 8, None, Schedule::Interleaved), LINK).unwrap();
    let slowest = |assignment: &[u32]| stage_costs(&tree, assignment, &objective).iter().map(|stage| stage.time).max();
    let weighted = partition(&tree, 2, &objective).unwrap();
    let plenty = partition_by_time_if_it_fits(&tree, 2, &objective, u64::MAX).unwrap();
    let scarce = partition_by_time_if_it_fits(&tree, 2, &objective, 1).unwrap();
    // The first rank keeps the activations of two microbatches, so balancing memory costs time.
    assert!(slowest(&plenty.assignment) < slowest(&weighted.assignment));
    assert_eq!(scarce, weighted);
}

#[test]
fn a_tied_output_layer_is_where_the_least_memory_is_needed() {
    let tree = transformer(24, 1280, 50_257, true, 4096);
    let path = |path: &str| tree.modules().iter().position(|module| module.path == path).expect("it has one");
    for partitions in [2, 4] {
        let objective = objective(partitions, 0.0);
        let found = partition(&tree, partitions, &objective).unwrap().assignment;
        let last = partitions as u32 - 1;
        assert_eq!((found[path("head")], found[path("body.embedding")], found[path("body.0.norm")]), (last, last, 0));
        let at_first: Vec<u32> = (tree.modules().iter().zip(&found))
            .map(|(module, &partition)| if ["head", "body.embedding"].contains(&&*module.path) { 0 } else { partition })
            .collect();
        assert!(cost::returns(&tree, &at_first, partitions) && !cost::returns(&tree, &found, partitions));
        // The output layer on the first partition keeps every microbatch for longer, and that partition keeps the most.
        assert!(cost::peak_bytes(&tree, &found, &objective) < cost::peak_bytes(&tree, &at_first, &objective));
    }
}

#[test]
fn a_result_of_one_large_module_returns() {
    let mut tree = Builder::default();
    let root = tree.container(None, "");
    for (path, time) in [("first", 100), ("large", 200), ("last", 100)] {
        tree.layer(root, path, 10, 10, time, 10);
    }
    let tree = tree.tree();
    assert!(cost::returns(&tree, &[0, 0, 1, 0], 2));
    assert!(!cost::returns(&tree, &[0, 0, 1, 1], 2));
}

#[test]
fn equal_blocks_stay_whole() {
    let tree = transformer(16, 1024, 10, false, 2048);
    let objective = Objective::new(0.2, kept_microbatches(4, 8, Some(6), Schedule::Simple), LINK).unwrap();
    let found = partition(&tree, 4, &objective).unwrap().assignment;
    for block in 0..16 {
        let prefix = format!("body.{block}.");
        let inside = tree.modules().iter().zip(&found).filter(|(module, _)| module.path.starts_with(&prefix));
        for (module, &partition) in inside {
            assert_eq!(partition, block / 4, "{}\n{}", module.path, table(&tree, &found, &objective));
        }
    }
}

#[test]
fn blocks_stay_whole_where_that_is_about_as_good() {
    let tree = transformer(32, 2048, 50_304, false, 2048);
    let blocks: Vec<usize> =
        (0..tree.modules().len()).filter(|&at| tree.modules()[at].path.matches('.').count() == 1).collect();
    for partitions in [2, 4] {
        for weight in [0.0, 0.2, 0.8] {
            let objective =
                Objective::new(weight, kept_microbatches(partitions, 16, None, Schedule::Interleaved), LINK).unwrap();
            let found = partition(&tree, partitions, &objective).unwrap().assignment;
            let extents = tree.extents(|module| Some(found[module]));
            for &block in &blocks {
                let (first, last) = extents[block].expect("it has parts");
                assert_eq!(first, last, "{weight}\n{}", table(&tree, &found, &objective));
            }
        }
    }
}

#[test]
fn the_tasks_of_a_split_module_count() {
    let tree = |tasks: u64| {
        let mut tree = Builder::default();
        let root = tree.container(None, "");
        let block = tree.container(Some(root), "block");
        for (part, time) in [(1, 50), (2, 30), (3, 70)] {
            let at = tree.layer(block, &format!("block.{part}"), 1, 0, time, 0);
            tree.tasks.push(Tasks { module: block, at, time: tasks });
        }
        tree.layer(root, "rest", 1, 0, 50, 0);
        tree.tree()
    };
    let link = LinkCost { latency: 0, bytes_per_tick: 1 };
    let objective = Objective::new(0.0, kept_microbatches(2, 1, None, Schedule::Interleaved), link).unwrap();
    // 50 + 30 beside 70 + 50, or as soon as that costs more, the block beside the rest.
    assert_eq!(partition(&tree(0), 2, &objective).unwrap().assignment, [0, 0, 0, 0, 1, 1]);
    let dear = tree(40);
    assert_eq!(partition(&dear, 2, &objective).unwrap().assignment, [0, 0, 0, 0, 0, 1]);
    let stages = stage_costs(&dear, &[0, 0, 0, 0, 1, 1], &objective);
    assert_eq!(stages.iter().map(|stage| stage.tasks).collect::<Vec<_>>(), [80, 40]);
}

#[test]
fn a_deep_model_is_cut_in_time() {
    let tree = transformer(2000, 64, 1000, true, 64);
    let found = partition(&tree, 64, &objective(64, 0.5)).unwrap().assignment;
    check_contiguous(&tree, &found);
    let mut used = found;
    used.sort_unstable();
    used.dedup();
    assert_eq!(used.len(), 64);
}

#[test]
fn a_container_is_where_its_first_part_is_and_what_follows_is_with_its_data() {
    let module = |path: &str, parent, parameters, run, follows| ModuleCost {
        path: path.to_owned(),
        parent,
        parameter_bytes: parameters,
        first_run: run,
        follows,
        ..ModuleCost::default()
    };
    let modules = vec![
        module("", None, 0, None, None),
        module("late", Some(0), 0, None, None),
        module("late.linear", Some(1), 100, Some(3), None),
        module("early", Some(0), 100, Some(1), None),
        module("relu", Some(0), 0, None, Some(2)),
        module("unused", Some(0), 0, None, None),
    ];
    let tree = CostTree::new(modules, Vec::new(), Vec::new(), &[]).unwrap();
    let found = partition(&tree, 2, &objective(2, 1.0)).unwrap().assignment;
    assert_eq!(found, [0, 1, 1, 0, 1, 0]);
    // More partitions than modules: the last ones are empty.
    assert_eq!(partition(&tree, 4, &objective(4, 1.0)).unwrap().assignment, [0, 1, 1, 0, 1, 0]);
}

#[test]
fn the_table_names_what_is_whole() {
    let tree = transformer(2, 128, 1000, false, 64);
    let text = table(&tree, &partition(&tree, 2, &objective(2, 0.8)).unwrap().assignment, &objective(2, 0.8));
    let rows: Vec<&str> = text.lines().map(|line| line.split("  ").next().unwrap().trim()).collect();
    assert_eq!(rows[0], "module");
    assert!(rows.contains(&"body.0") && rows.contains(&"head") && rows.contains(&"= partition 1"), "{text}");
}

#[test]
fn files_are_read_back() {
    let partitions: BTreeMap<String, u32> = [(String::new(), 0), ("a.b".into(), 1)].into();
    assert_eq!(from_json("p.json", &to_json(&partitions), 2).unwrap(), partitions);
    let error = from_json("p.json", &to_json(&partitions), 1).unwrap_err().to_string();
    assert_eq!(error, "`p.json` puts module `a.b` into partition 1, but there are 1");
    let error = from_json("p.json", "[1]", 1).unwrap_err().to_string();
    assert!(error.starts_with("`p.json` is not a JSON object of modules and their partitions: "), "{error}");
}

#[test]
fn invalid_trees_are_rejected() {
    let root = ModuleCost::default();
    let child = ModuleCost { path: "a".into(), parent: Some(1), ..ModuleCost::default() };
    let refused = |modules: Vec<ModuleCost>, values, ties: &[Vec<usize>]| {
        CostTree::new(modules, values, Vec::new(), ties).unwrap_err().to_string()
    };
    assert_eq!(refused(vec![], vec![], &[]), "a model has at least one module");
    assert_eq!(refused(vec![root.clone(), child], vec![], &[]), "the parent module of `a` does not precede it");
    let value = Value { from: 0, to: vec![7], bytes: 1 };
    assert_eq!(refused(vec![root.clone()], vec![value], &[]), "there is no module 7 among 1");
    assert_eq!(refused(vec![root.clone()], vec![], &[vec![0, 3]]), "there is no module 3 among 1");
    let child = ModuleCost { path: "a".into(), parent: Some(0), ..ModuleCost::default() };
    let tasks = vec![Tasks { module: 1, at: 0, time: 1 }];
    let error = CostTree::new(vec![root, child], vec![], tasks, &[]).unwrap_err().to_string();
    assert_eq!(error, "tasks of `a` are assigned to ``, which is not part of it");
    let error =
        Objective::new(1.5, kept_microbatches(1, 1, None, Schedule::Interleaved), LINK).unwrap_err().to_string();
    assert_eq!(error, "`memory_weight` is between 0 and 1, not 1.5");
}
