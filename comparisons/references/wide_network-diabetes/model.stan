data {
  int<lower=1> N;
  int<lower=1> F;
  matrix[N, F] x;
  vector[N] y;
  int<lower=1> width;
  int<lower=0, upper=1> rectified;  // 1: max(a, 0); 0: tanh(a)
  real<lower=0> sigma;
  real<lower=0> offset_scale;
  real<lower=0> noise;
}
parameters {
  matrix[F, width] hidden_weight;
  row_vector[width] hidden_bias;
  vector[width] output_weight;
  real output_bias;
}
model {
  matrix[N, width] a = x * hidden_weight + rep_matrix(hidden_bias, N);
  to_vector(hidden_weight) ~ normal(0, sigma / sqrt(F));
  hidden_bias ~ normal(0, offset_scale);
  output_weight ~ normal(0, sigma / sqrt(width));
  output_bias ~ normal(0, offset_scale);
  y ~ normal((rectified ? fmax(a, 0) : tanh(a)) * output_weight + output_bias, noise);
}
