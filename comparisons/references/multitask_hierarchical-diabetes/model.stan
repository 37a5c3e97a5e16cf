data {
  int<lower=1> N;
  int<lower=1> F;
  matrix[N, F] x;
  vector[N] y;
  int<lower=1> groups;
  array[N] int<lower=1, upper=groups> group;  // of each row, from 1
  int<lower=1> width;
  real<lower=0> noise_scale;
}
parameters {
  real<lower=0> noise;
  matrix[F, width] shared_weight;
  row_vector[width] shared_bias;
  vector[width] heads_weight_mean;
  real<lower=0> heads_weight_spread;
  matrix[width, groups] heads_weight_base;
  real heads_bias_mean;
  real<lower=0> heads_bias_spread;
  row_vector[groups] heads_bias_base;
}
model {
  matrix[width, groups] weight = (rep_matrix(heads_weight_mean, groups) + heads_weight_spread * heads_weight_base)
                                 / sqrt(width);
  row_vector[groups] bias = heads_bias_mean + heads_bias_spread * heads_bias_base;
  matrix[N, groups] f = tanh(x * shared_weight + rep_matrix(shared_bias, N)) * weight + rep_matrix(bias, N);
  noise ~ normal(0, noise_scale);
  to_vector(shared_weight) ~ normal(0, 1 / sqrt(F));
  shared_bias ~ normal(0, 1);
  heads_weight_mean ~ normal(0, 1);
  heads_weight_spread ~ normal(0, 1);
  to_vector(heads_weight_base) ~ normal(0, 1);
  heads_bias_mean ~ normal(0, 1);
  heads_bias_spread ~ normal(0, 1);
  heads_bias_base ~ normal(0, 1);
  for (n in 1 : N) {
    y[n] ~ normal(f[n, group[n]], noise);
  }
}
