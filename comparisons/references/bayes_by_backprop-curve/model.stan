functions {
  real scale_mixture_lpdf(vector w, real share, real wide, real narrow) {
    real total = 0;
    for (value in w) {
      total += log_mix(share, normal_lpdf(value | 0, wide), normal_lpdf(value | 0, narrow));
    }
    return total;
  }
}
data {
  int<lower=1> N;
  int<lower=1> F;
  matrix[N, F] x;
  vector[N] y;
  int<lower=1> width;
  real<lower=0, upper=1> share;
  real<lower=0> wide;
  real<lower=0> narrow;
  real<lower=0> noise;
}
parameters {
  matrix[F, width] hidden_weight;
  row_vector[width] hidden_bias;
  vector[width] output_weight;
  vector[1] output_bias;
}
model {
  to_vector(hidden_weight) ~ scale_mixture(share, wide, narrow);
  to_vector(hidden_bias) ~ scale_mixture(share, wide, narrow);
  output_weight ~ scale_mixture(share, wide, narrow);
  output_bias ~ scale_mixture(share, wide, narrow);
  y ~ normal(fmax(x * hidden_weight + rep_matrix(hidden_bias, N), 0) * output_weight + output_bias[1], noise);
}
