//! Looks for the largest value of a function that is dear to ask and answers with noise: a Gaussian process stands for what is
//! known of it, and the next place is the one that is expected to be most of an improvement.
//!
//! - SEA-1: what comes next follows from the answers alone: there are no random numbers.

/// Scales on which values may change, of the range: the likeliest one is taken.
const LENGTHS: [f64; 5] = [0.08, 0.15, 0.25, 0.4, 0.8];

/// Bayesian optimisation of a function with one argument between 0 and 1.
#[derive(Clone, Debug)]
pub(super) struct TuningSearch {
    /// Where the function may be asked.
    places: Vec<f64>,
    /// Where it is asked first, the next last.
    starts: Vec<usize>,
    /// How much of the variance of answers is noise.
    noise: f64,
    answers: Vec<(usize, f64)>,
    left: usize,
}

/// A Gaussian process that has seen answers.
struct GaussianProcess {
    length: f64,
    seen: Vec<f64>,
    /// The Cholesky factor of the answers' covariances, by rows.
    factor: Vec<Vec<f64>>,
    /// Their inverse times the answers.
    weights: Vec<f64>,
    log_likelihood: f64,
}

impl TuningSearch {
    /// Asks at `num_places` places that are evenly spaced, at four of them first, no place twice, and `limit` times in all. `noise`
    /// is the share of the answers' variance that it makes up.
    pub(super) fn new(num_places: usize, limit: usize, noise: f64) -> Self {
        let last = num_places.max(2) - 1;
        let places = (0..=last).map(|at| at as f64 / last as f64).collect();
        let mut starts = vec![last, 0, 2 * last / 3, last / 3];
        starts.reverse();
        starts.dedup();
        // Below that, equal answers would have no inverse.
        Self { places, starts, noise: noise.max(1e-6), answers: Vec::new(), left: limit.max(1).min(last + 1) }
    }

    /// The next place by its number; none if it was asked often enough.
    pub(super) fn next(&mut self) -> Option<usize> {
        self.left = self.left.checked_sub(1)?;
        match self.starts.pop() {
            Some(start) => Some(start),
            None => self.most_promising(),
        }
    }

    /// What the function is at a place.
    pub(super) fn answer(&mut self, place: usize, value: f64) {
        self.answers.push((place, value));
    }

    fn most_promising(&self) -> Option<usize> {
        let values: Vec<f64> = standardised(self.answers.iter().map(|(_, value)| *value).collect());
        let seen: Vec<f64> = self.answers.iter().map(|(place, _)| self.places[*place]).collect();
        let processes = LENGTHS.iter().map(|length| GaussianProcess::new(*length, self.noise, &seen, &values));
        let process = processes.max_by(|a, b| a.log_likelihood.total_cmp(&b.log_likelihood))?;
        // Without the noise of single answers.
        let best = seen.iter().map(|place| process.at(*place).0).fold(f64::NEG_INFINITY, f64::max);
        let is_new = |place: &usize| self.answers.iter().all(|(known, _)| known != place);
        let gain = |place: usize| {
            let (mean, deviation) = process.at(self.places[place]);
            expected_improvement(mean - best, deviation)
        };
        let gains = (0..self.places.len()).filter(is_new).map(|place| (place, gain(place)));
        gains.max_by(|a, b| a.1.total_cmp(&b.1).then(b.0.cmp(&a.0))).map(|(place, _)| place)
    }
}

impl GaussianProcess {
    fn new(length: f64, noise: f64, seen: &[f64], values: &[f64]) -> Self {
        let covariance = |row: usize, column: usize| {
            let own = if row == column { noise } else { 0.0 };
            kernel(seen[row], seen[column], length) + own
        };
        let mut factor: Vec<Vec<f64>> = Vec::with_capacity(seen.len());
        for row in 0..seen.len() {
            let mut line: Vec<f64> = Vec::with_capacity(row + 1);
            for (column, known) in factor.iter().enumerate() {
                let rest: f64 = line.iter().zip(known).map(|(one, other)| one * other).sum();
                line.push((covariance(row, column) - rest) / known[column]);
            }
            let rest: f64 = line.iter().map(|one| one * one).sum();
            line.push((covariance(row, row) - rest).max(1e-12).sqrt());
            factor.push(line);
        }
        let half = forward(&factor, values);
        let mut weights = half.clone();
        for row in (0..weights.len()).rev() {
            let rest: f64 = (row + 1..weights.len()).map(|at| factor[at][row] * weights[at]).sum();
            weights[row] = (weights[row] - rest) / factor[row][row];
        }
        let fit: f64 = half.iter().map(|one| one * one).sum();
        let spread: f64 = factor.iter().enumerate().map(|(row, line)| line[row].ln()).sum();
        Self { length, seen: seen.to_vec(), factor, weights, log_likelihood: -fit / 2.0 - spread }
    }

    /// What it expects at a place, and how far off that may be.
    fn at(&self, place: f64) -> (f64, f64) {
        let near: Vec<f64> = self.seen.iter().map(|seen| kernel(place, *seen, self.length)).collect();
        let mean = near.iter().zip(&self.weights).map(|(near, weight)| near * weight).sum();
        let known: f64 = forward(&self.factor, &near).iter().map(|one| one * one).sum();
        (mean, (1.0 - known).max(0.0).sqrt())
    }
}

/// Solves `factor * x = values`.
fn forward(factor: &[Vec<f64>], values: &[f64]) -> Vec<f64> {
    let mut solved: Vec<f64> = Vec::with_capacity(values.len());
    for (line, value) in factor.iter().zip(values) {
        let rest: f64 = line.iter().zip(&solved).map(|(one, known)| one * known).sum();
        solved.push((value - rest) / line[solved.len()]);
    }
    solved
}

fn kernel(one: f64, other: f64, length: f64) -> f64 {
    (-((one - other) / length).powi(2) / 2.0).exp()
}

/// With mean 0 and variance 1.
fn standardised(values: Vec<f64>) -> Vec<f64> {
    let count = values.len().max(1) as f64;
    let mean = values.iter().sum::<f64>() / count;
    let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / count;
    let scale = if variance > 0.0 { variance.sqrt() } else { 1.0 };
    values.into_iter().map(|value| (value - mean) / scale).collect()
}

/// Of a value that is `ahead` of the best one, give or take `deviation`.
fn expected_improvement(ahead: f64, deviation: f64) -> f64 {
    if deviation <= 0.0 {
        return ahead.max(0.0);
    }
    let z = ahead / deviation;
    let density = (-z * z / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt();
    ahead * below(z) + deviation * density
}

/// The normal distribution's share below `z`, to 1e-7: Abramowitz and Stegun, 26.2.17.
fn below(z: f64) -> f64 {
    let t = 1.0 / (1.0 + 0.231_641_9 * z.abs());
    let series = [0.319_381_530, -0.356_563_782, 1.781_477_937, -1.821_255_978, 1.330_274_429];
    let sum = series.iter().rev().fold(0.0, |sum, one| (sum + one) * t);
    let above = sum * (-z * z / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt();
    if z < 0.0 { above } else { 1.0 - above }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers from -1 to 1 that look random.
    fn noise(seed: &mut u64) -> f64 {
        *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (*seed >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }

    /// Every place that was asked, in order.
    fn searched(limit: usize, share: f64, mut function: impl FnMut(f64) -> f64) -> Vec<(f64, f64)> {
        let mut search = TuningSearch::new(41, limit, share);
        let mut asked = Vec::new();
        while let Some(place) = search.next() {
            let value = function(search.places[place]);
            search.answer(place, value);
            asked.push((search.places[place], value));
        }
        asked
    }

    #[test]
    fn the_top_of_a_smooth_function_is_found_in_spite_of_noise() {
        // Of 41 places 12 are asked; the best answer comes from near the top, wherever that is.
        for share in [0.01, 0.8] {
            for seed in 0..20u64 {
                let top = 0.05 + 0.9 * (seed as f64 / 19.0);
                let mut state = seed + 1;
                let function = |at: f64| 10.0 - 30.0 * (at - top).powi(2) + 0.2 * noise(&mut state);
                let asked = searched(12, share, function);
                assert_eq!(asked.len(), 12);
                let best = asked.iter().max_by(|a, b| a.1.total_cmp(&b.1)).unwrap();
                assert!((best.0 - top).abs() <= 0.13, "noise {share}, top {top}: {asked:?}");
            }
        }
    }

    #[test]
    fn the_higher_of_two_tops_is_found() {
        let hill = |at: f64, top: f64| (-((at - top) / 0.1).powi(2)).exp();
        let asked = searched(20, 0.05, |at| hill(at, 0.2) + 1.5 * hill(at, 0.8));
        let best = asked.iter().max_by(|a, b| a.1.total_cmp(&b.1)).unwrap();
        assert!((best.0 - 0.8).abs() <= 0.05, "{asked:?}");
    }

    #[test]
    fn the_same_answers_lead_to_the_same_places_and_none_comes_twice() {
        let asked = || searched(100, 0.8, |at| (7.0 * at).sin());
        let (one, other) = (asked(), asked());
        assert_eq!(one, other, "SEA-1");
        assert_eq!(one.len(), 41);
        let mut places: Vec<f64> = one.iter().map(|(place, _)| *place).collect();
        places.sort_by(f64::total_cmp);
        places.dedup();
        assert_eq!(places.len(), 41);
        // Of answers that do not differ nothing follows, and nothing breaks.
        assert_eq!(searched(9, 0.0, |_| 3.0).len(), 9);
        assert_eq!(searched(1, 0.5, |_| 3.0).len(), 1);
    }

    #[test]
    fn a_process_goes_through_what_it_has_seen_if_there_is_no_noise() {
        let (seen, values) = ([0.1, 0.4, 0.9], [1.0, -1.0, 0.5]);
        let process = GaussianProcess::new(0.25, 1e-9, &seen, &values);
        for (place, value) in seen.iter().zip(values) {
            let (mean, deviation) = process.at(*place);
            assert!((mean - value).abs() < 1e-5 && deviation < 1e-3, "{mean} {deviation}");
        }
        assert!(process.at(0.65).1 > 0.1);
        assert!((below(0.0) - 0.5).abs() < 1e-7 && (below(1.96) - 0.975).abs() < 1e-4 && below(-9.0) < 1e-9);
    }
}
