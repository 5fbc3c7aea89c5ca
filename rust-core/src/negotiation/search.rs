//! Bayesian optimisation: searches the maximum of a function that is expensive to measure and noisy. A Gaussian process
//! models the measurements so far, and the next point is the one with the largest expected improvement.
//!
//! - SEA-1: the next point depends on the measurements alone; no random numbers are used.

/// Candidate length scales of the process, relative to the range. The likeliest one is used.
const LENGTHS: [f64; 5] = [0.08, 0.15, 0.25, 0.4, 0.8];

/// Bayesian optimisation of a function with one argument between 0 and 1.
#[derive(Clone, Debug)]
pub(super) struct TuningSearch {
    /// The points at which the function may be measured.
    places: Vec<f64>,
    /// The points to measure first; the next one is last.
    starts: Vec<usize>,
    /// The share of noise in the variance of the measurements.
    noise: f64,
    answers: Vec<(usize, f64)>,
    left: usize,
}

/// A Gaussian process, conditioned on measurements.
struct GaussianProcess {
    length: f64,
    seen: Vec<f64>,
    /// The Cholesky factor of the measurements' covariance matrix, by rows.
    factor: Vec<Vec<f64>>,
    /// The inverse covariance matrix times the measurements.
    weights: Vec<f64>,
    log_likelihood: f64,
}

impl TuningSearch {
    /// Searches `num_places` evenly spaced points, four of them first. Each point is measured at most once, and `limit`
    /// points in all. `noise` is its share of the measurements' variance.
    pub(super) fn new(num_places: usize, limit: usize, noise: f64) -> Self {
        let last = num_places.max(2) - 1;
        let places = (0..=last).map(|at| at as f64 / last as f64).collect();
        let mut starts = vec![last, 0, 2 * last / 3, last / 3];
        starts.reverse();
        starts.dedup();
        // Below this, equal measurements would make the matrix singular.
        Self { places, starts, noise: noise.max(1e-6), answers: Vec::new(), left: limit.max(1).min(last + 1) }
    }

    /// Returns the index of the next point, or none after `limit` measurements.
    pub(super) fn next(&mut self) -> Option<usize> {
        self.left = self.left.checked_sub(1)?;
        match self.starts.pop() {
            Some(start) => Some(start),
            None => self.most_promising(),
        }
    }

    /// Adds the measurement at a point.
    pub(super) fn answer(&mut self, place: usize, value: f64) {
        self.answers.push((place, value));
    }

    fn most_promising(&self) -> Option<usize> {
        let values: Vec<f64> = standardised(self.answers.iter().map(|(_, value)| *value).collect());
        let seen: Vec<f64> = self.answers.iter().map(|(place, _)| self.places[*place]).collect();
        let processes = LENGTHS.iter().map(|length| GaussianProcess::new(*length, self.noise, &seen, &values));
        let process = processes.max_by(|a, b| a.log_likelihood.total_cmp(&b.log_likelihood))?;
        // The best prediction and not the best measurement, which contains noise.
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

    /// Returns the predicted mean at a point and its standard deviation.
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

/// Scales the values to mean 0 and variance 1.
fn standardised(values: Vec<f64>) -> Vec<f64> {
    let count = values.len().max(1) as f64;
    let mean = values.iter().sum::<f64>() / count;
    let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / count;
    let scale = if variance > 0.0 { variance.sqrt() } else { 1.0 };
    values.into_iter().map(|value| (value - mean) / scale).collect()
}

/// The expected improvement over the best value, for a prediction `ahead` of it with this standard deviation.
fn expected_improvement(ahead: f64, deviation: f64) -> f64 {
    if deviation <= 0.0 {
        return ahead.max(0.0);
    }
    let z = ahead / deviation;
    let density = (-z * z / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt();
    ahead * below(z) + deviation * density
}

/// The cumulative distribution function of the standard normal distribution, to 1e-7: Abramowitz and Stegun, 26.2.17.
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

    /// Pseudo-random numbers from -1 to 1.
    fn noise(seed: &mut u64) -> f64 {
        *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (*seed >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }

    /// Returns every measured point, in order.
    fn searched(limit: usize, share: f64, mut function: impl FnMut(f64) -> f64) -> Vec<(f64, f64)> {
        let mut search = TuningSearch::new(41, limit, share);
        let mut measured = Vec::new();
        while let Some(place) = search.next() {
            let value = function(search.places[place]);
            search.answer(place, value);
            measured.push((search.places[place], value));
        }
        measured
    }

    #[test]
    fn the_top_of_a_smooth_function_is_found_in_spite_of_noise() {
        // 12 of 41 points are measured; the best measurement is near the maximum, wherever that lies.
        for share in [0.01, 0.8] {
            for seed in 0..20u64 {
                let top = 0.05 + 0.9 * (seed as f64 / 19.0);
                let mut state = seed + 1;
                let function = |at: f64| 10.0 - 30.0 * (at - top).powi(2) + 0.2 * noise(&mut state);
                let measured = searched(12, share, function);
                assert_eq!(measured.len(), 12);
                let best = measured.iter().max_by(|a, b| a.1.total_cmp(&b.1)).unwrap();
                assert!((best.0 - top).abs() <= 0.13, "noise {share}, top {top}: {measured:?}");
            }
        }
    }

    #[test]
    fn the_higher_of_two_tops_is_found() {
        let hill = |at: f64, top: f64| (-((at - top) / 0.1).powi(2)).exp();
        let measured = searched(20, 0.05, |at| hill(at, 0.2) + 1.5 * hill(at, 0.8));
        let best = measured.iter().max_by(|a, b| a.1.total_cmp(&b.1)).unwrap();
        assert!((best.0 - 0.8).abs() <= 0.05, "{measured:?}");
    }

    #[test]
    fn the_same_answers_lead_to_the_same_places_and_none_comes_twice() {
        let measured = || searched(100, 0.8, |at| (7.0 * at).sin());
        let (one, other) = (measured(), measured());
        assert_eq!(one, other, "SEA-1");
        assert_eq!(one.len(), 41);
        let mut places: Vec<f64> = one.iter().map(|(place, _)| *place).collect();
        places.sort_by(f64::total_cmp);
        places.dedup();
        assert_eq!(places.len(), 41);
        // Equal measurements give no direction, and no error.
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
