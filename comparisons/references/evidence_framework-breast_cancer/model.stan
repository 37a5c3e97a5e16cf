data {
  int<lower=1> N;
  int<lower=1> F;
  matrix[N, F] x;
  array[N] int<lower=0, upper=1> y;
  int<lower=1> width;
  real<lower=0> precision;
}
parameters {
  matrix[F, width] hidden_weight;
  row_vector[width] hidden_bias;
  vector[width] output_weight;
  real output_bias;
}
model {
  to_vector(hidden_weight) ~ normal(0, 1 / sqrt(precision));
  hidden_bias ~ normal(0, 1 / sqrt(precision));
  output_weight ~ normal(0, 1 / sqrt(precision));
  output_bias ~ normal(0, 1 / sqrt(precision));
  y ~ bernoulli_logit(tanh(x * hidden_weight + rep_matrix(hidden_bias, N)) * output_weight + output_bias);
}
