data {
  int<lower=1> N;
  int<lower=1> F;
  matrix[N, F] x;
  vector[N] y;
  int<lower=1> width;
  real<lower=0> sigma;
  real<lower=0> noise_scale;
}
parameters {
  real<lower=0> noise;
  matrix[F, width] hidden_weight;
  row_vector[width] hidden_bias;
  vector[width] output_weight;
  real output_bias;
}
model {
  noise ~ normal(0, noise_scale);
  to_vector(hidden_weight) ~ normal(0, sigma / sqrt(F));
  hidden_bias ~ normal(0, sigma);
  output_weight ~ normal(0, sigma / sqrt(width));
  output_bias ~ normal(0, sigma);
  y ~ normal(tanh(x * hidden_weight + rep_matrix(hidden_bias, N)) * output_weight + output_bias, noise);
}
