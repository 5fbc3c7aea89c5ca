use proptest::prelude::*;

use super::*;
use crate::partition::{PartitionRequest, partition_layers};
use crate::pipeline::schedule::Schedule;

/// An operation with one result of 4 KiB that uses the first results of others.
fn operation(name: &str, inputs: &[usize]) -> Operation {
    Operation {
        name: name.to_owned(),
        kind: name.to_owned(),
        inputs: inputs.iter().map(|&operation| Output { operation, index: 0 }).collect(),
        outputs: vec![ResultSpec { text: "float32[1024]".to_owned(), bytes: 4096, not_transferable: None }],
        flops: 1000,
        ..Operation::default()
    }
}

fn in_layer(name: &str, inputs: &[usize], layer: usize, call: usize, variables: &[usize]) -> Operation {
    let layer = Some((layer, call));
    Operation { in_model: true, layer, variables: variables.to_vec(), ..operation(name, inputs) }
}

fn variables(count: usize) -> Vec<Variable> {
    vec![Variable { text: "(4, 4)".to_owned(), bytes: 64, binds: true }; count]
}

/// Two layers with a variable each, an activation between them, the loss and its gradients.
///
/// ```text
///   0 input ─> 1 one ─> 2 relu ─> 3 two ─> 4 out ─> 5 loss ─> 6 two' (weights) 7 two' ─> 8 relu' ─> 9 one' (weights)
/// ```
fn chain() -> Vec<Operation> {
    let number = |operations: Vec<Operation>| {
        operations.into_iter().enumerate().map(|(created, each)| Operation { created, ..each }).collect()
    };
    number(vec![
        Operation { role: OperationRole::Input, ..operation("x", &[]) },
        in_layer("one", &[0], 0, 0, &[0]),
        in_layer("relu", &[1], 1, 1, &[]),
        in_layer("two", &[2], 2, 2, &[1]),
        Operation { role: OperationRole::ModelResult, ..operation("out", &[3]) },
        operation("loss", &[4]),
        Operation { gradient_of: vec![3], ..operation("two_weights", &[2, 5]) },
        Operation { gradient_of: vec![3], ..operation("two_inputs", &[3, 5]) },
        Operation { gradient_of: vec![2], ..operation("relu_inputs", &[2, 7]) },
        Operation { gradient_of: vec![1], ..operation("one_weights", &[0, 8]) },
    ])
}

fn halves() -> ModuleRanks {
    ModuleRanks { layers: vec![Some(0), None, Some(1)], ..ModuleRanks::default() }
}

fn first(operation: usize) -> Output {
    Output { operation, index: 0 }
}

/// Rank 0 gets the loss and the gradient of the first weight, rank 1 the loss and that of the second.
fn wanted() -> Vec<Vec<Output>> {
    vec![vec![first(5), first(9)], vec![first(5), first(6)]]
}

fn described(segments: &Segments<'_>) -> Vec<String> {
    let each = |segment: &Segment| {
        let anchor = if segment.anchored { "!" } else { "" };
        format!("{}{anchor} {:?} {:?}", segment.phase.text(), segment.place, segment.operations)
    };
    segments.all().iter().map(each).collect()
}

#[test]
fn operations_are_where_their_layers_operands_and_origins_are() {
    let operations = Operations::new(chain(), variables(2)).unwrap();
    let placement = OperationPlacement::new(&operations, &halves()).unwrap();
    let places: Vec<OperationPlace> = (0..10).map(|each| placement.place(each)).collect();
    let (all, zero, one) = (OperationPlace::All, OperationPlace::On(0), OperationPlace::On(1));
    // The activation has no variables, so it is with its operand, and its gradient is with it; operations without
    // operands on a partition are on all ranks.
    assert_eq!(places, [all, zero, zero, one, all, all, one, one, zero, zero]);
    assert_eq!(placement.variables(), [Some(0), Some(1)]);
    assert!((0..10).filter(|&each| placement.is_forward(&operations, each)).eq([1, 2, 3]));
}

#[test]
fn a_script_places_what_no_layer_does() {
    let mut rows = chain();
    rows[2].requested = Some(1);
    let operations = Operations::new(rows, variables(2)).unwrap();
    let homes = ModuleRanks { default: Some(0), ..ModuleRanks::default() };
    let placement = OperationPlacement::new(&operations, &homes).unwrap();
    assert_eq!(
        [1, 2, 3, 8].map(|each| placement.place(each)),
        [OperationPlace::On(0), OperationPlace::On(1), OperationPlace::On(0), OperationPlace::On(1)]
    );
}

#[test]
fn a_variable_on_two_partitions_is_refused() {
    let mut rows = chain();
    rows[3].variables.push(0);
    let operations = Operations::new(rows, variables(2)).unwrap();
    assert_eq!(
        OperationPlacement::new(&operations, &halves()).unwrap_err().to_string(),
        "a variable of shape (4, 4) is used on partition 0 and by `two` on partition 1: layers and operations that share a variable \
         go to one partition"
    );
}

#[test]
fn the_state_of_a_generator_is_in_one_place_for_layers_in_two() {
    let mut rows = chain();
    rows[1].variables.push(2);
    rows[3].variables.push(2);
    let draw = Operation { variables: vec![2], ..in_layer("draw", &[], 2, 2, &[]) };
    rows.push(draw);
    let mut known = variables(3);
    known[2].binds = false;
    let operations = Operations::new(rows, known).unwrap();
    let placement = OperationPlacement::new(&operations, &halves()).unwrap();
    assert_eq!(placement.variables()[2], Some(0));
    assert_eq!(placement.place(10), OperationPlace::On(0));
}

#[test]
fn random_numbers_and_effects_of_layers_run_on_one_rank() {
    let mut rows = chain();
    // Noise that a layer adds to the model's input, and a message that the model prints.
    rows.push(Operation { has_effect: true, ..in_layer("noise", &[], 3, 3, &[]) });
    rows.push(in_layer("noisy", &[0, 10], 3, 3, &[]));
    rows.push(Operation { in_model: true, has_effect: true, ..operation("print", &[0]) });
    // A message that the script prints, and a state that all ranks change equally.
    rows.push(Operation { has_effect: true, ..operation("print", &[0]) });
    rows.push(Operation {
        in_model: true,
        has_effect: true,
        assigns: true,
        variables: vec![2],
        ..operation("count", &[0])
    });
    let operations = Operations::new(rows, variables(3)).unwrap();
    let placement = OperationPlacement::new(&operations, &halves()).unwrap();
    let (all, zero) = (OperationPlace::All, OperationPlace::On(0));
    assert_eq!([10, 11, 12, 13, 14].map(|each| placement.place(each)), [zero, zero, zero, all, all]);
}

#[test]
fn a_metrics_update_is_on_all_ranks_and_a_call_without_variables_in_one_place() {
    let mut rows = chain();
    // A layer without variables whose second operation uses a value of the other partition.
    rows.push(in_layer("add", &[1], 3, 3, &[]));
    rows.push(in_layer("mul", &[10, 3], 3, 3, &[]));
    rows.push(Operation { assigns: true, has_effect: true, variables: vec![2], ..operation("count", &[11]) });
    let operations = Operations::new(rows, variables(3)).unwrap();
    let placement = OperationPlacement::new(&operations, &halves()).unwrap();
    assert_eq!(
        [10, 11, 12].map(|each| placement.place(each)),
        [OperationPlace::On(1), OperationPlace::On(1), OperationPlace::All]
    );
    assert_eq!(placement.variables()[2], None);
}

#[test]
fn operations_that_keep_values_for_a_gradient_are_placed_with_their_loop() {
    let mut rows = chain();
    // A list that is added to the loop "two" when its gradient is created.
    let mut list = operation("list", &[1]);
    list.created = 20;
    rows.insert(2, list);
    for row in &mut rows[3..] {
        row.inputs.iter_mut().filter(|taken| taken.operation >= 2).for_each(|taken| taken.operation += 1);
        row.gradient_of.iter_mut().filter(|origin| **origin >= 2).for_each(|origin| *origin += 1);
    }
    rows[4].inputs.push(first(2));
    let operations = Operations::new(rows, variables(2)).unwrap();
    let placement = OperationPlacement::new(&operations, &halves()).unwrap();
    assert!(operations.is_of_model(2) && placement.is_forward(&operations, 2));
}

#[test]
fn segments_are_cut_and_ordered_by_the_schedule() {
    let operations = Operations::new(chain(), variables(2)).unwrap();
    let placement = OperationPlacement::new(&operations, &halves()).unwrap();
    let mut segments = Segments::cut(&operations, &placement, &wanted(), false).unwrap();
    assert_eq!(
        described(&segments),
        ["F! On(0) [1, 2]", "F! On(1) [3]", "R All [4, 5]", "B! On(1) [6, 7]", "B! On(0) [8, 9]"]
    );
    let crossing: Vec<(usize, usize, Vec<usize>)> =
        segments.transfers().iter().map(|each| (each.output.operation, each.from, each.to.clone())).collect();
    assert_eq!(crossing, [(2, 0, vec![1]), (3, 1, vec![0]), (7, 1, vec![0])]);
    assert_eq!(
        (segments.inputs_of(&[8, 9]), segments.outputs_of(&[1, 2], 0)),
        (vec![first(2), first(7), first(0)], vec![first(2)])
    );
    let mut order = |schedule| segments.plan(3, schedule, Some(3)).unwrap();
    assert_eq!(order(Schedule::Simple)[1], [(1, 0), (1, 1), (1, 2), (3, 0), (3, 1), (3, 2)]);
    assert_eq!(order(Schedule::Interleaved)[1], [(1, 0), (3, 0), (1, 1), (3, 1), (1, 2), (3, 2)]);
    let (orders, in_turns) = (order(Schedule::Simple), order(Schedule::Interleaved));
    assert_eq!(in_turns[0], [(0, 0), (0, 1), (4, 0), (4, 1), (0, 2), (4, 2)]);
    let messages = segments.messages(&in_turns);
    assert_eq!(messages, [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (1, 1), (2, 1), (1, 2), (2, 2)]);
    let lines = segments.lines(&orders);
    assert_eq!(lines[3], "%3: two(%2:0) -> float32[1024] on 1");
    assert_eq!(lines[10], "returned on 0: %5:0, %9:0");
    assert_eq!(lines[13], "order of 1: 1F0 1F1 1F2 1B0 1B1 1B2");
}

/// A layer of the second partition reads a variable, and changes it for the next microbatch.
#[test]
fn a_variable_is_read_when_the_microbatch_before_has_changed_it() {
    let mut rows = vec![
        Operation { role: OperationRole::Input, ..operation("x", &[]) },
        in_layer("one", &[0], 0, 0, &[0]),
        in_layer("read", &[], 1, 1, &[1]),
        in_layer("two", &[1, 2], 1, 1, &[]),
        in_layer("assign", &[3], 1, 1, &[1]),
        Operation { role: OperationRole::ModelResult, ..operation("out", &[3]) },
        // The gradient uses the value that was read.
        Operation { gradient_of: vec![3], ..operation("two_inputs", &[2, 5]) },
    ];
    (rows[4].has_effect, rows[4].assigns) = (true, true);
    rows.iter_mut().enumerate().for_each(|(created, row)| row.created = created);
    let operations = Operations::new(rows, variables(2)).unwrap();
    let homes = ModuleRanks { layers: vec![Some(0), Some(1)], ..ModuleRanks::default() };
    let placement = OperationPlacement::new(&operations, &homes).unwrap();
    assert_eq!(placement.level(2), 0);
    let segments = Segments::cut(&operations, &placement, &[vec![first(5)], vec![first(5), first(6)]], false).unwrap();
    assert_eq!(described(&segments)[..2], ["F! On(0) [1]", "F! On(1) [2, 3, 4]"]);
}

#[test]
fn the_first_half_of_a_backward_computes_what_other_ranks_need() {
    let operations = Operations::new(chain(), variables(2)).unwrap();
    let placement = OperationPlacement::new(&operations, &halves()).unwrap();
    let mut segments = Segments::cut(&operations, &placement, &wanted(), true).unwrap();
    assert_eq!(
        described(&segments),
        ["F! On(0) [1, 2]", "F! On(1) [3]", "R All [4, 5]", "I! On(1) [7]", "W! On(1) [6]", "W! On(0) [8, 9]"]
    );
    let orders = segments.plan(2, Schedule::ZeroBubble, Some(2)).unwrap();
    assert_eq!(orders[1].iter().filter(|(segment, _)| [3, 4].contains(segment)).count(), 4);
}

#[test]
fn an_evaluation_has_forwards_only_and_a_step_without_the_model_no_order() {
    let operations = Operations::new(chain(), variables(2)).unwrap();
    let placement = OperationPlacement::new(&operations, &halves()).unwrap();
    let mut segments = Segments::cut(&operations, &placement, &[vec![first(4)], vec![first(4)]], true).unwrap();
    assert_eq!(segments.plan(2, Schedule::ZeroBubble, Some(2)).unwrap(), [[(0, 0), (0, 1)], [(1, 0), (1, 1)]]);
    let mut segments = Segments::cut(&operations, &placement, &[vec![first(0)], vec![]], false).unwrap();
    assert_eq!(segments.plan(2, Schedule::Simple, Some(2)).unwrap(), [[], []]);
}

#[test]
fn values_that_cannot_pass_between_ranks_are_reported() {
    let mut rows = chain();
    rows[2].outputs[0].not_transferable = Some("of type string".to_owned());
    let operations = Operations::new(rows, variables(2)).unwrap();
    let placement = OperationPlacement::new(&operations, &halves()).unwrap();
    let error = Segments::cut(&operations, &placement, &wanted(), false).unwrap_err();
    assert!(matches!(error, Error::Unsupported(_)));
    assert_eq!(
        error.to_string(),
        "`relu:0`, a tensor of type string, would pass from partition 0 to 1: put the operations around it on one partition"
    );
}

#[test]
fn operations_that_do_not_fit_together_are_refused() {
    let refused = |rows, count| Operations::new(rows, variables(count)).unwrap_err().to_string();
    assert_eq!(refused(vec![operation("a", &[0])], 0), "`a` takes result 0 of operation 0");
    let waits = Operation { control_inputs: vec![3], ..operation("a", &[]) };
    assert_eq!(refused(vec![waits], 0), "`a` waits for operation 3, which comes after it");
    assert_eq!(refused(vec![in_layer("a", &[], 0, 0, &[1])], 1), "`a` takes variable 1, which does not exist");
}

#[test]
fn layers_are_divided_by_what_their_operations_cost() {
    let operations = Operations::new(chain(), variables(2)).unwrap();
    let layers = ["one", "relu", "two"].map(str::to_owned);
    let request = PartitionRequest {
        partitions: 2,
        memory_weight: 0.8,
        microbatches: 4,
        active_microbatches: Some(4),
        schedule: Schedule::Simple,
    };
    let (partitions, table) = partition_layers(&operations, &layers, request).unwrap();
    assert_eq!(partitions, [Some(0), None, Some(1)]);
    assert!(table.contains("one") && table.contains("two"), "{table}");
    // Layers that share a variable are on one partition.
    let mut rows = chain();
    rows[3].variables.push(0);
    let operations = Operations::new(rows, variables(2)).unwrap();
    assert_eq!(partition_layers(&operations, &layers, request).unwrap().0, [Some(0), None, Some(0)]);
    let plain = Operations::new(vec![operation("x", &[])], variables(0)).unwrap();
    assert_eq!(
        partition_layers(&plain, &[], request).unwrap_err().to_string(),
        "no layer of the model has variables: there is nothing to partition"
    );
}

/// A layer of the second partition reads a counter, which the step's body changes after the model's call.
#[test]
fn a_variable_is_changed_after_it_has_been_read_and_read_after_it_has_been_changed() {
    let mut rows = chain();
    rows[3].variables.push(2);
    let assign = Operation { has_effect: true, assigns: true, variables: vec![2], ..operation("assign", &[]) };
    rows.push(Operation { control_inputs: vec![3], created: 10, ..assign });
    let operations = Operations::new(rows, variables(3)).unwrap();
    let placement = OperationPlacement::new(&operations, &halves()).unwrap();
    let mut segments = Segments::cut(&operations, &placement, &wanted(), false).unwrap();
    let [read, assigned, backward] = [3, 10, 7].map(|operation| number_of(&segments, operation));
    assert_eq!(placement.place(10), OperationPlace::On(1));
    assert_ne!(read, assigned);
    assert!(segments.inputs_of(&[10]).is_empty());
    let after = |segment, back| ControlDependency { segment, back };
    assert_eq!(segments.after(assigned, 1), [after(read, 0), after(read, 1)]);
    assert_eq!(segments.after(read, 1), [after(assigned, 1)]);
    assert_eq!((segments.after(assigned, 0), segments.signals()), (vec![], &[][..]));
    assert_eq!(segments.lines(&[])[10], "%10: assign() -> float32[1024] on 1 after %3");
    segments.plan(3, Schedule::Interleaved, Some(3)).unwrap();
    assert!(segments.all()[read].anchored && segments.all()[backward].anchored);
}

fn number_of(segments: &Segments<'_>, operation: usize) -> usize {
    segments.all().iter().position(|each| each.operations.contains(&operation)).unwrap()
}

/// The first layer prints, then the second one, then the body, on all ranks.
#[test]
fn other_ranks_receive_signals_of_effects_that_they_wait_for() {
    let mut rows = chain();
    let print = |waits, row| Operation { has_effect: true, control_inputs: waits, outputs: vec![], ..row };
    rows.push(Operation { created: 10, ..print(vec![], in_layer("print", &[1], 0, 0, &[])) });
    rows.push(Operation { created: 11, ..print(vec![10], in_layer("print", &[3], 2, 2, &[])) });
    rows.push(Operation { created: 12, ..print(vec![11], operation("print", &[5])) });
    let operations = Operations::new(rows, variables(2)).unwrap();
    let placement = OperationPlacement::new(&operations, &halves()).unwrap();
    assert_eq!(
        [10, 11, 12].map(|each| placement.place(each)),
        [OperationPlace::On(0), OperationPlace::On(1), OperationPlace::All]
    );
    let mut segments = Segments::cut(&operations, &placement, &wanted(), false).unwrap();
    let [one, two, all] = [10, 11, 12].map(|operation| number_of(&segments, operation));
    let signals = [Signal { segment: one, from: 0, to: vec![1] }, Signal { segment: two, from: 1, to: vec![0] }];
    assert_eq!(segments.signals(), signals);
    for rank in 0..2 {
        assert_eq!(segments.after(all, rank), [ControlDependency { segment: two, back: 0 }]);
    }
    segments.plan(2, Schedule::Simple, Some(2)).unwrap();
}

/// Layers on partitions 0, 1 and 0; the gradients of both layers on 0 use the shape of the first layer's result.
#[test]
fn a_segment_whose_results_are_needed_before_its_backward_is_not_in_the_schedule() {
    let rows = vec![
        Operation { role: OperationRole::Input, ..operation("x", &[]) },
        in_layer("one", &[0], 0, 0, &[0]),
        in_layer("two", &[1], 1, 1, &[1]),
        in_layer("three", &[2], 2, 2, &[2]),
        Operation { role: OperationRole::ModelResult, ..operation("out", &[3]) },
        operation("loss", &[4]),
        Operation { gradient_of: vec![1], ..operation("shape", &[1]) },
        Operation { gradient_of: vec![3], ..operation("three_inputs", &[3, 5, 6]) },
        Operation { gradient_of: vec![2], ..operation("two_inputs", &[2, 6, 7]) },
    ];
    let rows = rows.into_iter().enumerate().map(|(created, each)| Operation { created, ..each }).collect();
    let operations = Operations::new(rows, variables(3)).unwrap();
    let homes = ModuleRanks { layers: vec![Some(0), Some(1), Some(0)], ..ModuleRanks::default() };
    let placement = OperationPlacement::new(&operations, &homes).unwrap();
    let wanted = vec![vec![first(5)], vec![first(5), first(8)]];
    for schedule in [Schedule::Simple, Schedule::Interleaved, Schedule::ZeroBubble] {
        let halves = schedule == Schedule::ZeroBubble;
        let mut segments = Segments::cut(&operations, &placement, &wanted, halves).unwrap();
        let orders = segments.plan(3, schedule, Some(3)).unwrap();
        let anchored = |operation| segments.all()[number_of(&segments, operation)].anchored;
        assert_eq!([6, 7, 8].map(anchored), [false, true, true], "{schedule:?}");
        assert_eq!(left_undone(&segments, &orders, 3), [], "{schedule:?}");
    }
}

/// Simulates the ranks, each with messages from the others; returns the segments that could not run, with rank and
/// microbatch.
fn left_undone(
    segments: &Segments<'_>,
    orders: &[Vec<(usize, usize)>],
    microbatches: usize,
) -> Vec<(usize, usize, usize)> {
    let runs = |rank: usize, segment: usize| !segments.on(segment, rank).is_empty();
    let number = |output: &Output| {
        let mut numbers = 0..segments.all().len();
        numbers.find(|&each| segments.all()[each].operations.contains(&output.operation))
    };
    let mut done = std::collections::BTreeSet::new();
    let mut left: Vec<(usize, usize, usize)> = (0..segments.ranks())
        .flat_map(|rank| (0..segments.all().len()).map(move |segment| (rank, segment)))
        .filter(|&(rank, segment)| runs(rank, segment))
        .flat_map(|(rank, segment)| (0..microbatches).map(move |mb| (rank, segment, mb)))
        .collect();
    loop {
        let ready = |&(rank, segment, mb): &(usize, usize, usize)| {
            let there = |other: usize, mb: usize| match segments.all()[other].place {
                OperationPlace::On(home) => done.contains(&(home, other, mb)),
                OperationPlace::Free | OperationPlace::All => done.contains(&(rank, other, mb)),
            };
            let inputs = segments.inputs_of(&segments.on(segment, rank));
            let order = &orders[rank];
            let place = order.iter().position(|&each| each == (segment, mb));
            assert_eq!(place.is_some(), segments.all()[segment].anchored && !order.is_empty());
            inputs.iter().filter_map(number).all(|other| there(other, mb))
                && segments
                    .after(segment, rank)
                    .iter()
                    .all(|each| mb < each.back || there(each.segment, mb - each.back))
                && match place {
                    Some(place) => place == 0 || done.contains(&(rank, order[place - 1].0, order[place - 1].1)),
                    None => mb == 0 || done.contains(&(rank, segment, mb - 1)),
                }
        };
        let (now, later): (Vec<_>, Vec<_>) = left.into_iter().partition(ready);
        left = later;
        if now.is_empty() {
            return left;
        }
        done.extend(now);
    }
}

/// Properties of layers of random steps.
#[derive(Clone, Copy, Debug)]
struct RandomLayers {
    /// Whether the layer computes no gradient for its input.
    is_first: bool,
    /// Whether the layer's gradient uses the shape of its input, on the partition of the producer or of the layer.
    shape: Option<bool>,
    /// Whether the layer prints.
    prints: bool,
    /// The body adds a term to the loss that depends on the layer's variable only.
    penalty: bool,
    /// The body changes its variable at the end, by the layer's input or by the loss.
    changes: Option<bool>,
}

fn extras() -> impl Strategy<Value = RandomLayers> {
    let seldom = || prop::bool::weighted(0.2);
    let option = || prop::option::weighted(0.3, any::<bool>());
    (seldom(), option(), seldom(), seldom(), option()).prop_map(|(is_first, shape, prints, penalty, changes)| {
        RandomLayers { is_first, shape, prints, penalty, changes }
    })
}

/// Layers on random partitions that use random values of earlier ones, a loss, and gradients in reverse order.
fn steps() -> impl Strategy<Value = (Vec<Operation>, Vec<Option<usize>>)> {
    let one = (0_usize..3, prop::collection::vec(any::<prop::sample::Index>(), 1..3), extras());
    prop::collection::vec(one, 1..8).prop_map(|layers| {
        let mut rows = vec![Operation { role: OperationRole::Input, ..operation("x", &[]) }];
        // For each value, its operation.
        let mut values = vec![0];
        let mut inputs: Vec<Vec<usize>> = vec![Vec::new()];
        let mut printed: Vec<usize> = Vec::new();
        let mut print = |rows: &mut Vec<Operation>, row: Operation| {
            rows.push(Operation { has_effect: true, outputs: vec![], control_inputs: printed.clone(), ..row });
            printed = vec![rows.len() - 1];
        };
        for (number, (_, operands, extras)) in layers.iter().enumerate() {
            let operands: Vec<usize> = operands.iter().map(|operand| operand.index(values.len())).collect();
            let taken: Vec<usize> = operands.iter().map(|&operand| values[operand]).collect();
            rows.push(in_layer("layer", &taken, number, number, &[number]));
            values.push(rows.len() - 1);
            inputs.push(operands);
            if extras.prints {
                let row = in_layer("print", &[rows.len() - 1], number, number, &[]);
                print(&mut rows, row);
            }
        }
        let count = layers.len();
        rows.push(Operation { role: OperationRole::ModelResult, ..operation("out", &[values[count]]) });
        let mut parts = vec![rows.len() - 1];
        for (number, _) in layers.iter().enumerate().filter(|(_, (_, _, extras))| extras.penalty) {
            rows.push(Operation { variables: vec![number], ..operation("penalty", &[]) });
            parts.push(rows.len() - 1);
        }
        rows.push(operation("loss", &parts));
        let loss = rows.len() - 1;
        let row = operation("print", &[loss]);
        print(&mut rows, row);
        let mut gradients: Vec<Option<usize>> = vec![None; count + 1];
        gradients[count] = Some(loss);
        for layer in (1..=count).rev() {
            let Some(given) = gradients[layer] else { continue };
            let mut needs = vec![values[layer], given];
            let RandomLayers { is_first, shape, .. } = layers[layer - 1].2;
            if let Some(made) = shape {
                let taken = values[inputs[layer][0]];
                let origin = if made { taken } else { values[layer] };
                rows.push(Operation { gradient_of: vec![origin], ..operation("shape", &[taken]) });
                needs.push(rows.len() - 1);
            }
            rows.push(Operation { gradient_of: vec![values[layer]], ..operation("gradient", &needs) });
            let made = rows.len() - 1;
            for &operand in inputs[layer].iter().filter(|_| !is_first) {
                gradients[operand] = Some(match gradients[operand] {
                    Some(other) if other != made => {
                        rows.push(Operation { gradient_of: vec![values[operand]], ..operation("sum", &[other, made]) });
                        rows.len() - 1
                    }
                    _ => made,
                });
            }
        }
        for (number, (_, _, extras)) in layers.iter().enumerate() {
            let Some(by_loss) = extras.changes else { continue };
            let inputs = if by_loss { vec![loss] } else { vec![] };
            let waits = (0..rows.len()).filter(|&each| rows[each].variables == [number]).collect();
            let row = Operation { control_inputs: waits, variables: vec![number], ..operation("assign", &inputs) };
            rows.push(Operation { has_effect: true, assigns: true, ..row });
        }
        rows.push(operation("result", &[loss]));
        let rows = rows.into_iter().enumerate().map(|(created, each)| Operation { created, ..each }).collect();
        (rows, layers.into_iter().map(|(partition, _, _)| Some(partition)).collect())
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    /// Every input of a rank's segment is computed on that rank, is an argument, or arrives from the rank that
    /// computes it.
    #[test]
    fn random_steps_are_cut_so_that_everybody_has_what_he_needs((rows, layers) in steps()) {
        let count = rows.len();
        let operations = Operations::new(rows, variables(layers.len())).unwrap();
        let homes = ModuleRanks { layers, ..ModuleRanks::default() };
        let placement = OperationPlacement::new(&operations, &homes).unwrap();
        let wanted: Vec<Vec<Output>> = (0..3).map(|_| vec![first(count - 1)]).collect();
        for halves in [false, true] {
            let segments = Segments::cut(&operations, &placement, &wanted, halves).unwrap();
            for rank in 0..3 {
                let mut there: Vec<Output> = (0..count)
                    .filter(|&each| operations.all()[each].role == OperationRole::Input)
                    .map(first)
                    .collect();
                there.extend(segments.transfers().iter().filter(|each| each.to.contains(&rank)).map(|each| each.output));
                for number in 0..segments.all().len() {
                    let here = segments.on(number, rank);
                    for taken in segments.inputs_of(&here) {
                        prop_assert!(there.contains(&taken), "{taken:?} of {:?}", segments.all()[number]);
                    }
                    there.extend(segments.outputs_of(&here, rank));
                }
                prop_assert!(there.contains(&first(count - 1)));
            }
        }
    }

    /// All ranks finish a step with every schedule, and no rank waits for a signal that is not sent.
    #[test]
    fn random_steps_end_on_all_ranks((rows, layers) in steps(), microbatches in 1_usize..4, active in 1_usize..4) {
        let count = rows.len();
        let operations = Operations::new(rows, variables(layers.len())).unwrap();
        let placement = OperationPlacement::new(&operations, &ModuleRanks { layers, ..ModuleRanks::default() }).unwrap();
        let wanted: Vec<Vec<Output>> = (0..3).map(|_| vec![first(count - 1)]).collect();
        for schedule in [Schedule::Simple, Schedule::Interleaved, Schedule::ZeroBubble] {
            let mut segments = Segments::cut(&operations, &placement, &wanted, schedule == Schedule::ZeroBubble).unwrap();
            let orders = segments.plan(microbatches, schedule, Some(active)).unwrap();
            prop_assert_eq!(left_undone(&segments, &orders, microbatches), []);
            for rank in 0..3 {
                for segment in 0..segments.all().len() {
                    for other in segments.after(segment, rank).into_iter().filter(|after| after.back == 0) {
                        let from = segments.all()[other.segment].place.partition();
                        let is_signalled = segments.signals().iter().any(|signal| {
                            signal.segment == other.segment && Some(signal.from) == from && signal.to.contains(&rank)
                        });
                        prop_assert!(is_signalled == from.is_some_and(|from| from != rank));
                    }
                }
            }
        }
    }
}
