//! Three traces of real sizes: what is staged, in which order, and how many are in use at once.
//!
//! The shapes are published ones; the order is that of the work, and where a size varies from one time to the next, the
//! distribution is made up around a published mean, by a seed that is printed.

/// The sizes that one program asks for.
pub struct Trace {
    pub name: &'static str,
    /// Where the shapes are from.
    pub source: &'static str,
    /// Where there is little memory, all sizes are a part of the real ones, one in two to this. Rounding is the same at
    /// every scale, since the steps begin as much lower.
    pub small_log2: u32,
    /// Buffers in use at once.
    pub window: usize,
    /// What one round asks for, in order.
    pub round: fn(&mut Random) -> Vec<usize>,
    pub rounds: usize,
    pub rounds_quick: usize,
}

pub const TRACES: [Trace; 3] = [
    Trace {
        name: "a prover's arenas",
        source: "Groth16 over BN254, 1 438 805 constraints and 1 406 686 variables (alinush.github.io/keyless-groth16), \
                 then four recursion proofs, 135 wires, rate 1/8 (plonky2's standard_recursion_config)",
        small_log2: 4,
        window: 6,
        round: prover,
        rounds: 4,
        rounds_quick: 1,
    },
    Trace {
        name: "a model's tensors",
        source: "weights in bf16, streamed layer by layer: Llama 3 8B (hidden 4096, feed-forward 14336, 8 of 32 heads for \
                 keys and values, vocabulary 128256), then Llama 2 7B (11008, 32 of 32, 32000)",
        small_log2: 4,
        window: 4,
        round: models,
        rounds: 2,
        rounds_quick: 1,
    },
    Trace {
        name: "a data loader's batches",
        source: "ImageNet: batches of 64 images, decoded (224 x 224 x 3 bytes) and as JPEG (110 KB on the average, 1 281 167 \
                 images, so the last batch has 15); batches of 128 token sequences padded to the longest",
        small_log2: 0,
        window: 12,
        round: loader,
        rounds: 6,
        rounds_quick: 1,
    },
];

/// A linear congruential generator; the same on every machine.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Evenly spread from 0 to 1.
    fn unit(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Log-normal, by a sum of evenly spread numbers.
    fn around(&mut self, median: f64, spread: f64) -> f64 {
        let normal = (0..12).map(|_| self.unit()).sum::<f64>() - 6.0;
        median * (spread * normal).exp()
    }
}

/// Bytes of a scalar, of a point in G1 and of one in G2, affine; and of an element of plonky2's field, and of a digest.
const SCALAR: usize = 32;
const G1: usize = 64;
const G2: usize = 128;
const ELEMENT: usize = 8;
const DIGEST: usize = 32;

fn prover(_: &mut Random) -> Vec<usize> {
    const CONSTRAINTS: usize = 1_438_805;
    const VARIABLES: usize = 1_406_686;
    const DOMAIN: usize = 1 << 21;
    let mut sizes = vec![VARIABLES * SCALAR];
    // The three polynomials go up as evaluations; the coefficients of the quotient come down.
    sizes.extend([CONSTRAINTS * SCALAR; 3]);
    sizes.push((DOMAIN - 1) * SCALAR);
    // The points of each multi-scalar multiplication.
    sizes.extend([VARIABLES * G1, VARIABLES * G1, VARIABLES * G2, VARIABLES * G1, (DOMAIN - 1) * G1]);
    for degree_log2 in [14, 13, 12, 12] {
        let rows = 1usize << degree_log2;
        let extended = rows << 3;
        // The tree over the extended rows, less the sixteen digests of its cap.
        let tree = 2 * (extended - 16) * DIGEST;
        // Wires; permutation products and partial products of two challenges; quotient, eight chunks of two.
        for columns in [135, 2 * 10, 2 * 8] {
            sizes.extend([rows * columns * ELEMENT, extended * columns * ELEMENT, tree]);
        }
    }
    sizes
}

fn models(_: &mut Random) -> Vec<usize> {
    const BF16: usize = 2;
    const HIDDEN: usize = 4096;
    const LAYERS: usize = 32;
    let mut sizes = Vec::new();
    for (feed_forward, keys, vocabulary) in [(14336, 1024, 128_256), (11008, 4096, 32_000)] {
        sizes.push(vocabulary * HIDDEN * BF16);
        for _ in 0..LAYERS {
            sizes.extend([HIDDEN, keys, keys, HIDDEN].map(|columns| HIDDEN * columns * BF16));
            sizes.extend([feed_forward * HIDDEN * BF16; 3]);
            sizes.extend([HIDDEN * BF16; 2]);
        }
        sizes.extend([HIDDEN * BF16, vocabulary * HIDDEN * BF16]);
    }
    sizes
}

fn loader(random: &mut Random) -> Vec<usize> {
    const BATCH: usize = 64;
    const IMAGE: usize = 224 * 224 * 3;
    const SEQUENCES: usize = 128;
    const LONGEST: f64 = 2048.0;
    /// Batches in a round; the last one is what is left of an epoch.
    const BATCHES: usize = 60;
    let mut sizes = Vec::new();
    for batch in 0..BATCHES {
        let images = if batch + 1 == BATCHES { 1_281_167 % BATCH } else { BATCH };
        sizes.push(images * IMAGE);
        // The mean of a log-normal is its median times e to the half of the square of its spread.
        let jpegs = (0..images).map(|_| random.around(110e3 / 1.133, 0.5) as usize);
        sizes.push(jpegs.sum());
        let longest = (0..SEQUENCES).map(|_| random.around(300.0, 0.7).min(LONGEST)).fold(1.0, f64::max);
        // Identifiers of 8 bytes.
        sizes.push(SEQUENCES * longest as usize * 8);
    }
    sizes
}
