data {
  int<lower=1> N;
  int<lower=1> F;
  matrix[N, F] x;
  array[N] int<lower=0> y;
  int<lower=1> width;
  real<lower=0> sigma;
  real<lower=0> level;
}
parameters {
  real<lower=0> concentration;
  matrix[F, width] hidden_weight;
  row_vector[width] hidden_bias;
  vector[width] output_weight;
  real output_bias;
}
model {
  concentration ~ lognormal(1, 1);
  to_vector(hidden_weight) ~ normal(0, sigma / sqrt(F));
  hidden_bias ~ normal(0, sigma);
  output_weight ~ normal(0, sigma / sqrt(width));
  output_bias ~ normal(0, level);
  y ~ neg_binomial_2_log(tanh(x * hidden_weight + rep_matrix(hidden_bias, N)) * output_weight + output_bias, concentration);
}
